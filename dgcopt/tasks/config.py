"""Settings from files and the command line, by jsonargparse, with errors that name the valid ones.

A config chooses classes and functions by name, which are imported and called: run only configs that you trust, as you
would a script.
"""

import inspect
import pkgutil
import re
from argparse import SUPPRESS
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

from jsonargparse import ArgumentParser, Namespace

from ..errors import ConfigError

__all__ = ["Parser"]


class Parser(ArgumentParser):
    """A parser that refuses an unknown key in one line, with its file and the valid keys.

    If a setting is a function that makes an object (`Callable[..., Optimizer]`), a class_path must be a class of
    such objects, or a function that is annotated to return one or to return such a function. It is refused before it
    is called.
    """

    _reading: Any = ""
    """The file that is being parsed."""

    def parse_path(self, path: Any, *args: Any, **kwargs: Any) -> Namespace:
        """Parse as jsonargparse does; errors name the file."""
        self._reading = path
        try:
            parsed = super().parse_path(path, *args, **kwargs)
        except UnicodeDecodeError as error:
            self.error(f"this is no text file ({error.reason}): give a YAML file of settings")
        self._reading = ""
        return parsed

    def validate(self, namespace: Namespace, *args: Any, **kwargs: Any) -> None:
        """As jsonargparse does; ends with an error for a function that may return something else than it should, and
        for text with a NUL character, which no path may hold.
        """
        super().validate(namespace, *args, **kwargs)
        for name, value in namespace.items():
            if isinstance(value, str) and "\0" in value:
                self.error(f'"{name}" is {value!r:.200}, with a NUL character: write it without')
        if problem := self._wrong_factory(namespace):
            self.error(problem)

    def instantiate(self, namespace: Namespace, *args: Any, **kwargs: Any) -> Namespace:
        """Instantiate as jsonargparse does. Raises ConfigError for a function that may return another type than
        required, and the ConfigError of a class that may also be None, which jsonargparse tells among types.
        """
        if problem := self._wrong_factory(namespace):
            raise ConfigError(problem)
        try:
            return super().instantiate(namespace, *args, **kwargs)
        except ValueError as error:
            if isinstance(error.__cause__, ConfigError):
                raise error.__cause__ from None
            raise

    def _wrong_factory(self, settings: Namespace) -> str:
        """Return the problem of the first setting with a function that may return another type than it needs."""
        for action in self._actions:
            wanted = tuple(_made_by(getattr(action, "_typehint", None)))
            value = settings.get(action.dest) if wanted else None
            name = value.get("class_path") if isinstance(value, dict | Namespace) else None
            if isinstance(name, str) and not _makes(pkgutil.resolve_name(name), wanted):
                kinds = " or ".join(kind.__name__ for kind in wanted)
                return (
                    f'"{action.dest}": {name} is no class of {kinds} and no function that is annotated to return one, '
                    f"and is not called; give such a class, or annotate the function"
                )
        return ""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """End with exit code 2 and one line; in a parser within a parser, report to the outer one."""
        if re.search("is not accepted$|unrecognized arguments", message):
            keys = (action.dest.strip("\u200b") for action in self._actions if action.default != SUPPRESS)
            message += f"; valid here: {', '.join(keys) or 'nothing; settings of a class_path belong under init_args'}"
        if message.startswith("Unexpected config:"):
            message = "a config has a line `setting: value` for each, and this one names none"
        if self.exit_on_error:
            message = _cause(message)
        if self._reading:
            message = f"{self._reading}: {message}"
        if not self.exit_on_error:  # a class's own parser, which reports to its outer one
            super().error(message, ex)
        self.exit(2, f"{self.prog}: {' '.join(message.split())}\n")


def _cause(message: str) -> str:
    """Return the setting, its value and the valid ones in place of jsonargparse's message about a wrong value.

    jsonargparse begins with the types around the setting. Other messages, and those about several settings, stay.
    """
    place = ".".join(re.findall('Parser key "(.*?)":', message))
    kinds = r"Expected a (?:typing\.Literal\[(.*?)\]|<class '(?!NoneType)(.*?)'>)|Not of type (\w+):"
    wanted = [*re.finditer(kinds, message)]
    unknown = re.search(r"class_path '([^']*)':\s+((?:module|No module).*)|import path string: (\S+)", message)
    if unknown and not wanted:
        return (
            f'"{place}" is {unknown[1] or unknown[3]}, which cannot be imported ({unknown[2] or "it has no dot"}): '
            f"give module.Class; `dgcopt compressors` and `dgcopt averaging` list those of dgcopt"
        )
    if not wanted or message.rfind('Parser key "') > wanted[0].start():
        return message
    given = re.compile(r"(?:Got|Given) value: (.*?)(?:\. Got value|$)", re.M).search(message, wanted[-1].end())
    valid = " or ".join(f"one of {found[1]}" if found[1] else found[2] or found[3] for found in wanted)
    return f'"{place}" is {given[1]!r:.200}, and must be {valid}' if given else message


def _made_by(hint: Any) -> Iterator[type]:
    """Yield the types that functions of a type hint return: Optimizer of `Callable[..., Optimizer] | None`."""
    if get_origin(hint) is Callable:
        returned = get_args(hint)[-1]
        yield from [returned] if inspect.isclass(returned) else _made_by(returned)
        return
    for part in get_args(hint):
        yield from _made_by(part)


def _makes(made: Any, wanted: tuple[type, ...]) -> bool:
    """Return True for a class of a wanted type, and for a function annotated to return one, or such a function."""
    if inspect.isclass(made):
        return issubclass(made, wanted)
    try:
        returned = get_type_hints(made).get("return")
    except (TypeError, NameError):  # a builtin, or annotations with names that exist for type checkers alone
        return False
    return _makes(returned, wanted) if inspect.isclass(returned) else any(set(wanted) & {*_made_by(returned)})
