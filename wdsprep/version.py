"""The version, where every room may import it."""

__version__ = "0.2.0"
