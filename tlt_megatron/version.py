"""The version, for the package and the command line."""

__version__ = "0.1.0"
