"""The version of this package, kept apart so that everything can read it."""

__version__ = "0.1.0"
