"""kvd: the KV cache daemon of a GPU host."""

__version__ = "0.1.0"
