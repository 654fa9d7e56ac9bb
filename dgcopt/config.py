"""Settings from files and the command line, by jsonargparse, with errors that say what would have been right."""

import re
from argparse import SUPPRESS
from typing import NoReturn

from jsonargparse import ArgumentParser

__all__ = ["Parser"]


class Parser(ArgumentParser):
    """Refuses an unknown key in one line that names it and the keys that exist in its place."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """End with exit code 2 and one line; in a parser within a parser, report to the outer one."""
        if re.search("is not accepted$|unrecognized arguments", message):
            keys = (action.dest.strip("\u200b") for action in self._actions if action.default != SUPPRESS)
            message += f"; valid here: {', '.join(keys) or 'nothing; settings of a class_path belong under init_args'}"
        if not self.exit_on_error:  # a class's own parser, which reports to the one that it is part of
            super().error(message, ex)
        self.exit(2, f"{self.prog}: {' '.join(message.split())}\n")
