"""The border to clients: socket, rings, sessions."""
