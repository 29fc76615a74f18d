"""Other hosts: who holds what, and how it is fetched."""
