"""The admin channel: how the command line asks a running daemon, and steers it.

`kvd/ipc/admin.py` is the daemon's end of the socket, `desk.py` what the requests do, `client.py`
the command line's end. Who may do what: `desk.Visitor`.
"""
