"""The version of this package; ranks compare theirs."""

__version__ = "0.1.0"
