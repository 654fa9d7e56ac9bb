"""Settings from files and the command line, by jsonargparse, with errors that say what would have been right."""

import re
from argparse import SUPPRESS
from typing import Any, NoReturn

from jsonargparse import ArgumentParser, Namespace

__all__ = ["Parser"]


class Parser(ArgumentParser):
    """Refuses an unknown key in one line that names it, its file, and the keys that exist in its place."""

    _reading: Any = ""
    """The file whose settings are looked at."""

    def parse_path(self, path: Any, *args: Any, **kwargs: Any) -> Namespace:
        """As jsonargparse does, but errors name the file."""
        self._reading = path
        parsed = super().parse_path(path, *args, **kwargs)
        self._reading = ""
        return parsed

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """End with exit code 2 and one line; in a parser within a parser, report to the outer one."""
        if re.search("is not accepted$|unrecognized arguments", message):
            keys = (action.dest.strip("\u200b") for action in self._actions if action.default != SUPPRESS)
            message += f"; valid here: {', '.join(keys) or 'nothing; settings of a class_path belong under init_args'}"
        if message.startswith("Unexpected config:"):
            message = "a config has a line `setting: value` for each, and this one names none"
        if self._reading:
            message = f"{self._reading}: {message}"
        if not self.exit_on_error:  # a class's own parser, which reports to the one that it is part of
            super().error(message, ex)
        self.exit(2, f"{self.prog}: {' '.join(message.split())}\n")
