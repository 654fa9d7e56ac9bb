"""Version of the package, which ranks compare, and of the state that it writes."""

__version__ = "0.1.0"

FORMAT = 1
"""Version of checkpoints, state dicts and pickled hooks; raised with their layout. Other versions are refused."""
