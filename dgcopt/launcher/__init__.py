"""`dgcopt run`: starts the ranks of a script, by a launcher's command line or by an agent of its own (`--survive`)."""

from .command import add_arguments, launch

__all__ = ["add_arguments", "launch"]
