"""The generated subclass of a wrapped optimizer: the object stays the same, its class changes."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

from torch.optim import Optimizer

from ..compressors.own_step import passes_over_missing_gradients
from ..errors import ConfigError

__all__ = ["Step", "bare_class", "bare_step", "become"]

Step: TypeAlias = Callable[..., Any]
"""The `step` of an optimizer's class: a function of the optimizer, a closure if any, and other arguments."""


def become(optimizer: Optimizer, ours: type[Optimizer], step_of: Callable[[Step], Step]) -> None:
    """Change the class of `optimizer` to one that has the methods of `ours` ahead of its own.

    `step_of(bare)` returns the method that runs between the hooks of a step; `bare` is the class's own step, without
    any, and so is `bare_step(optimizer)` until the class changes again. Raises ConfigError if something else was bound
    in place of `step` that may move weights in a step that no rank is to take.
    """
    base: Any = type(optimizer)
    kind = _subclass(base, ours, step_of)  # type: ignore[arg-type]
    _bind_anew(optimizer, kind)
    optimizer.__class__ = kind


def bare_class(optimizer: Optimizer) -> type[Optimizer]:
    """Return the class of the optimizer before any `become`."""
    generated = [kind for kind in type(optimizer).__mro__ if kind in _BARE]
    return _BARE[generated[-1]][0] if generated else type(optimizer)


def bare_step(optimizer: Optimizer) -> Step:
    """Return the step of the optimizer's class before the last `become`, without hooks: a function of the optimizer."""
    return next(_BARE[kind][1] for kind in type(optimizer).__mro__ if kind in _BARE)


_BARE: dict[type[Optimizer], tuple[type[Optimizer], Step]] = {}
"""For each generated class, the original class and its step without hooks."""


@functools.cache
def _subclass(base: Any, ours: Any, step_of: Callable[[Step], Step]) -> type[Optimizer]:
    bare = base.step
    if getattr(bare, "__code__", None) is _with_hooks(bare).__code__:
        bare = bare.__wrapped__
    step = functools.update_wrapper(step_of(bare), bare)
    body = {"__doc__": base.__doc__, "__module__": base.__module__, "step": _with_hooks(step)}
    kind: type[Optimizer] = _ahead_of(type(base), ours)(base.__name__, (base, ours), body)
    _BARE[kind] = base, bare
    return kind


def _ahead_of(kind: Any, ours: type[Optimizer]) -> Any:
    """Return a metaclass like `kind` that puts the methods of `ours` first, although a class names `base` first.

    Python lets an object change to a class that has its memory laid out by the same first base. With `ours` first, that
    fails for optimizers whose first base is none itself, such as `class Mine(ABC, Optimizer)`.
    """
    first = [cls for cls in ours.__mro__ if cls not in Optimizer.__mro__]

    def mro(cls: Any) -> list[type]:
        new, *others = kind.mro(cls)
        return [new, *first, *(other for other in others if other not in first)]

    return type(kind.__name__, (kind,), {"mro": mro})


def _with_hooks(step: Any) -> Any:
    """Wrap a class's `step` as torch does: with the optimizer's hooks around it."""
    hooked: Any = Optimizer.profile_hook_step(step)
    hooked.hooked = True  # otherwise torch would wrap it again
    return hooked


def _bind_anew(optimizer: Optimizer, kind: type[Optimizer]) -> None:
    """Make a scheduler that has bound the old class's `step` call that of `kind`."""
    bound, own = vars(optimizer).get("step"), type(optimizer).step
    # newer torch names the function that its scheduler calls, older torch does not
    if hasattr(bound, "_wrapped_by_lr_sched") and getattr(bound, "__wrapped__", own) is own:
        reference = weakref.ref(optimizer)

        @functools.wraps(bound)  # type: ignore[arg-type]
        def step(*args: Any, **kwargs: Any) -> Any:
            optimizer: Any = reference()
            optimizer._opt_called = True  # everything that the scheduler reads
            return kind.step(optimizer, *args, **kwargs)

        optimizer.step = step  # type: ignore[method-assign]
    elif bound is not None and not passes_over_missing_gradients(optimizer):
        name = type(optimizer).__name__
        raise ConfigError(
            f"this {name}'s `step` was replaced before the optimizer was wrapped, so dgcopt cannot skip a step after "
            f"NaN or Inf. Wrap the optimizer first, then replace its `step`"
        )
