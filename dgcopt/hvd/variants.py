"""Variants of a collective, by Horovod's names: blocking, with a handle, in place and grouped, made from its `Plan`."""

from __future__ import annotations

import hashlib
import inspect
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..collectives import AllGather
from ..comm import Comm
from ..exchange.agreement import SAME_MODEL, compare
from .compression import cast_for_wire
from .world import comm_of

__all__ = ["Handle", "Plan", "announce", "asynchronous", "blocking", "grouped", "in_place", "poll", "synchronize"]


class Handle:
    """A collective in flight, for `poll` and `synchronize`, which several threads may call."""

    def __init__(self, is_done: Callable[[], bool], finish: Callable[[], Any]) -> None:
        self._is_done = is_done
        self._finish: Callable[[], Any] | None = finish
        self._result: Any = None
        self._lock = threading.Lock()

    def is_done(self) -> bool:
        """Return True if `result` would return at once."""
        return self._finish is None or self._is_done()

    def result(self) -> Any:
        """Wait for the result."""
        with self._lock:
            if self._finish is not None:
                self._result, self._finish = self._finish(), None
            return self._result


def poll(handle: Handle) -> bool:
    """Return True if `synchronize(handle)` would return at once."""
    return handle.is_done()


def synchronize(handle: Handle) -> Any:
    """Wait for a collective that an `_async` function started; return its result."""
    return handle.result()


# -- announcement and launch -----------------------------------------------------------------------------------------


@dataclass
class Plan:
    """A collective that is ready to be announced and started.

    Attributes:
        label: its name on the wire.
        line: its description, which must be equal on all ranks.
        start: starts it, given every rank's `numbers`, a row each.
        backward: the collective on the gradient of the result.
    """

    comm: Comm
    label: str
    line: str
    start: Callable[[Tensor], Handle]
    backward: Callable[[Tensor], Tensor]
    numbers: Sequence[int] = ()


def announce(comm: Comm, label: str, lines: Sequence[str], numbers: Sequence[int] = ()) -> Tensor:
    """Return every rank's `numbers`, at most as many as ranks, in a row for each rank.

    Raises MismatchError on all ranks if `lines` differ: Horovod compares collectives by itself, other libraries would
    mix up the bytes or end the process. All announcements have the same form, so any two can meet.
    """
    if comm.wire == "horovod" and not numbers:
        return torch.empty(comm.size, 0)
    mine = torch.zeros(1 + comm.size, dtype=torch.int64, device="cpu")
    mine[0] = int.from_bytes(hashlib.blake2b("\n".join(lines).encode(), digest_size=7).digest(), "big")
    mine[1 : 1 + len(numbers)] = torch.tensor(numbers, device="cpu")
    announced = comm.run(AllGather(mine, group="control", label=f"announcement of {label}"))
    if announced[:, 0].ne(announced[0, 0]).any():
        remedy = f"{SAME_MODEL} All ranks must start their collectives in the same order."
        comm.drive(compare([*lines], comm.rank, label, remedy))
    return announced[:, 1 : 1 + len(numbers)]


# -- variants of an operation ----------------------------------------------------------------------------------------


def _launch(plans: Sequence[Plan], comm: Comm) -> list[Handle]:
    """Start collectives after one announcement of all, or one for each if they announce numbers."""
    if any(plan.numbers for plan in plans):
        return [plan.start(announce(comm, plan.label, [plan.line], plan.numbers)) for plan in plans]
    announced = announce(comm, plans[0].label if plans else "no collective", [plan.line for plan in plans])
    return [plan.start(announced) for plan in plans]


class _Differentiable(torch.autograd.Function):
    """A collective whose backward pass is another collective."""

    @staticmethod
    def forward(ctx: Any, planned: Callable[[Tensor], Plan], tensor: Tensor) -> Any:
        plan = planned(tensor)
        ctx.backward_of = plan.backward
        return synchronize(*_launch([plan], plan.comm))

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *others: Any) -> Any:
        return None, ctx.backward_of(grad)


def _variant(name: str, of: Callable[..., Any], doc: str | None, call: Callable[[dict[str, Any]], Any]) -> Any:
    """Return a function with the signature of `of`, which gives `call` its arguments by name."""
    parameters = list(inspect.signature(of).parameters.values())
    if "_async" in name:
        parameters = [parameter for parameter in parameters if parameter.name != "compression"]
    if name.startswith("grouped_"):
        parameters[0] = parameters[0].replace(name="tensors")
    signature = inspect.Signature(parameters)

    def variant(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        return call(given.arguments)

    variant.__name__ = variant.__qualname__ = name
    variant.__doc__, vars(variant)["__signature__"] = doc, signature
    return variant


def blocking(name: str, planned: Callable[..., Plan]) -> Any:
    def call(given: dict[str, Any]) -> Any:
        tensor, compression = given.pop("tensor"), given.pop("compression", None)
        message = tensor if compression is None else cast_for_wire(tensor, compression)
        result = _Differentiable.apply(lambda sent: planned(sent, **given), message)
        return result if compression is None else result.to(tensor.dtype)

    return _variant(name, planned, planned.__doc__, call)


def asynchronous(name: str, planned: Callable[..., Plan]) -> Any:
    def call(given: dict[str, Any]) -> Handle:
        plan = planned(**given)
        return _launch([plan], plan.comm)[0]

    return _variant(name, planned, "Start the collective once all ranks have announced it, in the same order.", call)


def grouped(name: str, one: Callable[..., Any]) -> Any:
    def call(given: dict[str, Any]) -> Any:
        comm, label, tensors = comm_of(given["process_set"]), given.pop("name"), given.pop("tensors")
        if label is None:  # by number Horovod, which goes by names, would meet the next collective
            number = f" {next(given['process_set'].unnamed)}" if comm.wire == "horovod" else ""
            label = f"group{number} of {len(tensors)} tensors"
        if not name.endswith("_async"):  # one after the other: a longer list would meet the next collective
            announce(comm, f"hvd.{name}", [f"hvd.{name} of {len(tensors)} tensors"], [len(tensors)])
        results = [one(t, name=f"{label}.{place}", **given) for place, t in enumerate(tensors)]
        if not name.endswith("_async"):
            return results
        handles = _launch(results, comm)
        return Handle(lambda: all(map(poll, handles)), lambda: [*map(synchronize, handles)])

    return _variant(name, one, "The same for each of several tensors.", call)


def in_place(name: str, start: Callable[..., Handle]) -> Any:
    def call(given: dict[str, Any]) -> Any:
        target, started = next(iter(given.values())), start(**given)

        def finish() -> Any:
            result = started.result()
            for tensor, value in [(target, result)] if isinstance(target, Tensor) else zip(target, result, strict=True):
                tensor.detach().copy_(value)
            return target

        handle = Handle(started.is_done, finish)
        return handle if "_async" in name else synchronize(handle)

    return _variant(name, start, "As without the underscore, in place.", call)
