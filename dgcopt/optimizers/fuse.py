"""Fused steps: adjacent parameters are stepped as one flat tensor, by torch's own step.

An elementwise step treats all elements alike. So during the step the optimizer's groups hold a few flat tensors in
place of their parameters, with flat state; before and after it, parameters and their state are views of the same
memory. Parameters that do not fit are stepped one by one.

Measurements decide the layout. A kernel costs some microseconds regardless of its size, so small tensors are stepped
together even if their gradients must be copied; long tensors only if their gradients are adjacent. torch's fused
kernels make one pass instead of many, so they are the default on a CPU unless the group says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import is_
from typing import Any, TypeVar

import torch
from torch import Tensor, optim
from torch.optim import Optimizer

from ..compressors.own_step import steps_as
from ..errors import ConfigError
from ..errors.checks import check_flag
from ..exchange.parameters import check_optimizer
from ..flat.buckets import Segment
from ..flat.gradient import LARGE
from ..gradients.subclass import Step, bare_class, become
from ..gradients.synchronised import synchronised
from ..kernels import BLOCK, is_plain

__all__ = ["fuse_optimizer"]

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)

ELEMENTWISE = (
    optim.ASGD,
    optim.Adadelta,
    optim.Adagrad,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
    optim.SGD,
)
OTHERS = {
    "Adafactor": "its state has a row and a column of each matrix",
    "LBFGS": "its direction and the length of its step are made of all parameters together",
    "Muon": "it orthogonalises each matrix as a whole",
    "SparseAdam": "its gradients are sparse, and lie nowhere as a whole",
}
"""torch's optimizers that are not elementwise, with the reason."""

MOVES = 4
"""Number of times that parameters follow a new layout of their gradients."""


def fuse_optimizer(optimizer: AnyOptimizer, do_flatten: bool = True, *, elementwise: bool = False) -> AnyOptimizer:
    """Make `optimizer` step all its small tensors in a few kernels; return the same object.

    The object's class becomes a generated subclass. Results equal the plain optimizer's bit for bit, with two
    exceptions: bfloat16, and torch's fused CPU kernels, which round differently and are used if `fused` is True or if
    `fused` and `foreach` are unset (`fused=False` keeps the bits). Its `state_dict()` has the plain optimizer's format.
    Copies and pickles are plain optimizers.

    Args:
        optimizer: any elementwise optimizer of `torch.optim`. Fuse it before `dgcopt.DistributedOptimizer` wraps it;
            parameters then follow the layout of gradients in buckets, and no gradient is copied.
        do_flatten: move the parameters of each group, dtype and device into contiguous memory; `param.data` becomes a
            view of it. False fuses only parameters that are adjacent already.
        elementwise: set it for a user-defined optimizer if each element's step depends only on that element, its
            gradient and its state.

    Raises ConfigError for optimizers that are not elementwise, are wrapped by `dgcopt.DistributedOptimizer` already, or
    are differentiable.
    """
    check_optimizer(optimizer)
    check_flag(do_flatten, "do_flatten")
    check_flag(elementwise, "elementwise")
    if isinstance(optimizer, Fused):
        raise ConfigError("this optimizer is fused already")
    if synchronised(optimizer) is not None:
        raise ConfigError("fuse the optimizer first: DistributedOptimizer(dgcopt.fuse_optimizer(optimizer), ...)")
    name = type(optimizer).__name__
    if not steps_as(optimizer, *ELEMENTWISE):
        for other, reason in OTHERS.items():
            if hasattr(optim, other) and steps_as(optimizer, getattr(optim, other)):
                raise ConfigError(f"{name} cannot be fused: {reason}")
        if not elementwise:
            raise ConfigError(
                f"{name} is no elementwise optimizer of torch.optim: if each element's step depends on that element, "
                f"its gradient and its state alone, say fuse_optimizer(..., elementwise=True)"
            )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ConfigError(f"{name}(differentiable=True) cannot be fused: its steps are part of the graph")
    become(optimizer, Fused, _step_of)
    assert isinstance(optimizer, Fused)
    optimizer.flattens = do_flatten
    optimizer.lay_out()
    return optimizer


class Fused(Optimizer):
    """The methods of a fused optimizer's generated class; never instantiated."""

    flattens: bool
    _plans: list[Plan]

    def lay_out(self) -> None:
        """Move parameters into contiguous memory, if `do_flatten`, before the next step."""
        self._plans = [Plan(group, self.param_groups, self.flattens) for group in self.param_groups]

    @torch.no_grad()
    def step_in_runs(self, bare: Step) -> None:
        """Run torch's own step on flat tensors."""
        groups = self.param_groups
        self._plans = self._plans[: len(groups)] + [Plan(g, groups, self.flattens) for g in groups[len(self._plans) :]]
        before = [(group, group["params"], group.get("fused")) for group in groups]
        for plan, group in zip(self._plans, groups, strict=True):
            plan.keep_up(group, groups, self.state)
        try:
            for plan, group in zip(self._plans, groups, strict=True):
                plan.begin(self.state)
                group["params"] = plan.stepped()
                if plan.takes_fused_kernel:
                    group["fused"] = True
            bare(self)
        finally:
            for (group, params, fused), plan in zip(before, self._plans, strict=True):
                group["params"] = params
                if plan.takes_fused_kernel:
                    group["fused"] = fused
                plan.end(self.state)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy or pickle as the plain optimizer: shared memory cannot be described."""
        return object.__new__, (bare_class(self),), self.__getstate__()


def _step_of(bare: Step) -> Step:
    """Return the step between its hooks. The closure runs first and sees the ordinary parameters."""

    def step(optimizer: Fused, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        optimizer.step_in_runs(bare)
        return loss

    return step


class Run:
    """Adjacent parameters that are stepped as one tensor.

    Args:
        segments: the parameters' positions.
        states: their present or future entries in the optimizer's state.

    Attributes:
        flat: their memory.
        state: the optimizer state of `flat`.
        flat_grad: memory for copies of their gradients; None if the gradients are adjacent.
    """

    def __init__(self, segments: Sequence[Segment], states: list[dict[str, Any]]) -> None:
        self.params = [segment.param for segment in segments]
        flat = joined(self.params, segments)
        assert flat is not None
        self.flat = flat
        self._own = [Segment(s.name, s.param, s.start - segments[0].start) for s in segments]
        self._bytes = [segment.start * flat.element_size() for segment in self._own]
        self._addresses = [flat.data_ptr() + offset for offset in self._bytes]
        self._strides = [param.stride() for param in self.params]
        self.flat_grad = None if joined(self._grads(), self._own) is not None else torch.zeros_like(flat)
        self._share_memory = _share_memory(self._grads())
        if self.flat_grad is not None:
            self._copies = [segment.view(self.flat_grad) for segment in self._own]
        self._states = states
        self._counts: dict[str, Tensor] = {}
        self.state: dict[str, Any] = {}
        for name in states[0]:
            self._share(name, self._together([state[name] for state in states]))
        self._remember()

    def _grads(self) -> list[Tensor]:
        return [param.grad for param in self.params if param.grad is not None]

    def _together(self, values: list[Any]) -> Any:
        """Build the state of `flat` from the parameters' states."""
        first = values[0]
        if not isinstance(first, Tensor) or first.dim() == 0:
            return first
        flat = joined(values, self._own)
        if flat is None:
            flat = first.new_zeros(self.flat.numel())
            torch._foreach_copy_([segment.view(flat) for segment in self._own], values)
        return flat

    def _share(self, name: str, value: Any) -> None:
        """Share the state of `flat` with every parameter."""
        each = [value] * len(self.params)
        if isinstance(value, Tensor) and value.shape == self.flat.shape:
            each = [segment.view(value) for segment in self._own]
        elif isinstance(value, Tensor):  # one each, since the plain optimizer counts in place
            self._counts[name] = value.expand(len(self.params)).clone()
            each = list(self._counts[name].unbind())
            value = each[0]
        self.state[name] = value
        for state, own in zip(self._states, each, strict=True):
            state[name] = own

    def _remember(self) -> None:
        self._known = dict(self.state)
        self._held = [value for state in self._states for value in state.values()]
        self._versions = self._versions_now()

    def _versions_now(self) -> list[int]:
        """Return version counters of the step counts, to detect changes in place."""
        return [count._version for count in self._counts.values()]

    def fits(self, states: dict[Tensor, dict[str, Any]]) -> bool:
        """Return True if parameters, gradients and state have not moved in memory. All parameters have gradients."""
        now = list(map(states.get, self.params)) if self.state else self._states
        if list(map(Tensor.data_ptr, self.params)) != self._addresses or not all(map(is_, now, self._states)):
            return False
        held = [value for state in self._states for value in state.values()]
        if len(held) != len(self._held) or not all(map(is_, held, self._held)):
            return False
        if self._versions_now() != self._versions:
            return False
        grads = self._grads()
        if not all(map(is_plain, grads)) or _share_memory(grads) != self._share_memory:
            return False
        if self.flat_grad is not None:
            return True
        first = grads[0].data_ptr()
        lie = list(map(Tensor.data_ptr, grads)) == [first + offset for offset in self._bytes]
        return lie and list(map(Tensor.stride, grads)) == self._strides

    def begin(self, states: dict[Tensor, dict[str, Any]]) -> None:
        """Prepare the flat tensor for a step."""
        grads = self._grads()
        if self.flat_grad is not None:
            torch._foreach_copy_(self._copies, grads)
            self.flat.grad = self.flat_grad
        else:
            self.flat.grad = grads[0].detach().as_strided(self.flat.shape, (1,), grads[0].storage_offset())
        states[self.flat] = self.state

    def end(self, states: dict[Tensor, dict[str, Any]]) -> None:
        """Pass the flat tensor's state on to the parameters after a step."""
        states.pop(self.flat, None)
        self.flat.grad = None
        for count in self._counts.values():
            count.fill_(count[0])
        known = self._known
        new = [name for name, value in self.state.items() if name not in known or value is not known[name]]
        if new:
            for name in new:
                self._share(name, self.state[name])
            states.update(zip(self.params, self._states, strict=True))
            self._remember()
        self._versions = self._versions_now()
        _count_change(self.params)


class Plan:
    """The plan of a group's step: its runs, and parameters that are stepped one by one.

    Attributes:
        takes_fused_kernel: True if torch's fused kernel is used although the group does not ask for it.
    """

    takes_fused_kernel: bool = False
    _may_take_it: bool = False

    def __init__(self, group: dict[str, Any], groups: Sequence[dict[str, Any]], flattens: bool) -> None:
        self.flattens = flattens
        self.runs: list[Run] = []
        self._alone: list[Tensor] = []
        self._has_grad: list[bool] = []
        self._moves = 0
        self._lay_out(group["params"], groups)

    def stepped(self) -> list[Tensor]:
        """Return the tensors for the optimizer to step."""
        return [run.flat for run in self.runs] + self._alone

    def begin(self, states: dict[Tensor, dict[str, Any]]) -> None:
        alone = [states.get(param, {}) for param in self._alone]
        # torch's fused SGD takes the momentum of all parameters or of none
        starting = {state.get("momentum_buffer") is None for state in (*alone, *(run.state for run in self.runs))}
        lies_alike = all(map(_lies_alike, self._alone, alone))
        self.takes_fused_kernel = self._may_take_it and lies_alike and len(starting) == 1
        for run in self.runs:
            run.begin(states)

    def end(self, states: dict[Tensor, dict[str, Any]]) -> None:
        for run in self.runs:
            run.end(states)

    def keep_up(
        self, group: dict[str, Any], groups: Sequence[dict[str, Any]], states: dict[Tensor, dict[str, Any]]
    ) -> None:
        """Update the plan if parameters have moved, other ones have gradients, or the state was replaced."""
        params = group["params"]
        same = len(params) == len(self.params) and all(map(is_, params, self.params))
        has_grad = [param.grad is not None for param in params]
        if same and has_grad == self._has_grad and all(run.fits(states) for run in self.runs):
            return
        if not (same and self._lies() and self._follows_gradients()):
            self._lay_out(params, groups)
        self._has_grad = has_grad
        self._find_runs(group, states)

    # -- positions of parameters
    # ----------------------------------------------------------------------------------------

    def _lay_out(self, params: Sequence[Tensor], groups: Sequence[dict[str, Any]]) -> None:
        """Find the positions of parameters, after moving them together if `do_flatten`."""
        self.params = list(params)
        lying: dict[Any, list[Tensor]] = {}
        whole = [p for p in _apart(params, groups) if self.flattens or p.is_contiguous()]
        for param in in_order(whole) if self.flattens else sorted(whole, key=Tensor.data_ptr):
            place = None if self.flattens else _storage(param)
            lying.setdefault((param.dtype, param.device, place), []).append(param)
        self._areas: list[list[Segment]] = []
        for members in lying.values():
            segments, start = [], 0
            for param in members:
                segments.append(Segment("", param, start if self.flattens else int(param.storage_offset())))
                start += -(-param.numel() // BLOCK) * BLOCK
            if self.flattens:
                with torch.no_grad():
                    flat = members[0].new_zeros(start, requires_grad=False)
                    views = [segment.view(flat) for segment in segments]
                    torch._foreach_copy_(views, [param.detach() for param in members])
                    for param, view in zip(members, views, strict=True):
                        param.data = view
            self._areas.append(segments)
        self._addresses = [[s.param.data_ptr() for s in area] for area in self._areas]

    def _lies(self) -> bool:
        """Return True if no parameter has moved."""
        return all(
            segment.param.data_ptr() == address
            for area, addresses in zip(self._areas, self._addresses, strict=True)
            for segment, address in zip(area, addresses, strict=True)
        )

    def _follows_gradients(self) -> bool:
        """Return True if parameters have the order of their gradients, as far as these share memory."""
        if not self.flattens or self._moves == MOVES:
            return True
        for area in self._areas:
            ours = [segment.param for segment in area]
            among = set(ours)
            theirs = in_order([param for param in self.params if param in among])
            if not all(a is b for a, b in zip(ours, theirs, strict=True) if _is_part(a.grad) or _is_part(b.grad)):
                self._moves += 1
                return False
        return True

    # -- runs of parameters ------------------------------------------------------------------------------------

    def _find_runs(self, group: dict[str, Any], states: dict[Tensor, dict[str, Any]]) -> None:
        with_grad = [param for param in self.params if param.grad is not None]
        on_cpu = all(param.is_cpu for param in with_grad)
        open_to_all = "fused" in group and group["fused"] is None and group.get("foreach") is None
        # torch's fused SGD is wrong in half precision
        plain = all(param.dtype in (torch.float32, torch.float64) and not _sparse(param) for param in with_grad)
        self._may_take_it = bool(with_grad and on_cpu and open_to_all and plain)
        self.runs = [
            Run(members, [states.get(segment.param, {}) for segment in members])
            for area in self._areas
            for members in self._together(area, states)
        ]
        among = {param for run in self.runs for param in run.params}
        self._alone = [param for param in with_grad if param not in among]

    def _together(self, area: Sequence[Segment], states: dict[Tensor, dict[str, Any]]) -> Iterator[list[Segment]]:
        """Find parameters to step as one: those with adjacent gradients, and small ones."""
        run: list[Segment] = []
        lies = is_small = False
        for segment in area:
            param = segment.param
            if param.grad is None or not _fits(param.grad, param) or not _is_of(states.get(param, {}), param):
                if run:
                    yield run
                run = []
                continue
            if (
                run
                and (self.flattens or segment.start == run[-1].stop)
                and _alike(states.get(run[-1].param, {}), states.get(param, {}))
            ):
                pair = [run[-1], segment]
                lie = joined([each.param.grad for each in pair if each.param.grad is not None], pair) is not None
                if lie and (lies or len(run) == 1):
                    run.append(segment)
                    lies, is_small = True, False
                    continue
                if is_small and segment.numel < LARGE:
                    run.append(segment)
                    continue
            if run:
                yield run
            run, lies, is_small = [segment], False, segment.numel < LARGE
        if run:
            yield run


def joined(tensors: Sequence[Tensor], segments: Sequence[Segment]) -> Tensor | None:
    """Return the flat memory of tensors with the segments' layout; None if they have another."""
    first = tensors[0]
    storage, origin = _storage(first), first.storage_offset() - segments[0].start
    for tensor, segment in zip(tensors, segments, strict=True):
        if (
            tensor.storage_offset() - segment.start != origin
            or tensor.stride() != segment.param.stride()
            or tensor.dtype != first.dtype
            or _storage(tensor) != storage
        ):
            return None
    length = segments[-1].stop - segments[0].start
    return first.detach().as_strided((length,), (1,), first.storage_offset())


def in_order(params: Sequence[Tensor]) -> list[Tensor]:
    """Sort parameters like their gradients in shared memory, otherwise last first, as in backward."""
    seen: dict[int, int] = {}
    last_first = list(reversed(params))

    def key(param: Tensor) -> tuple[int, int]:
        grad = param.grad
        if grad is None or not _is_part(grad):
            return len(params), 0
        return seen.setdefault(_storage(grad), len(seen)), int(grad.storage_offset())

    return sorted(last_first, key=key)


def _apart(params: Sequence[Tensor], groups: Sequence[dict[str, Any]]) -> list[Tensor]:
    """Return the parameters of one of the groups that are contiguous and share no memory with another of any group."""
    held = [param for group in groups for param in group["params"] if _has_memory(param)]
    held.sort(key=lambda param: (str(param.device), param.data_ptr()))
    shared: set[Tensor] = set()
    last = None  # the one that reaches furthest so far
    for param in held:
        if last is not None and last.device == param.device and param.data_ptr() < _end(last):
            shared |= {last, param}
            last = max(last, param, key=_end)
        else:
            last = param
    return [param for param in params if _is_whole(param) and param not in shared]


def _has_memory(param: Tensor) -> bool:
    return (
        param.layout == torch.strided and param.numel() > 0 and not hasattr(param, "device_mesh") and not param.is_meta
    )


def _end(param: Tensor) -> int:
    """Return the address behind a parameter's last element."""
    last = sum((size - 1) * stride for size, stride in zip(param.shape, param.stride(), strict=True))
    return param.data_ptr() + (last + 1) * param.element_size()


def _is_whole(param: Tensor) -> bool:
    """Return True if a parameter is contiguous, in rows or channels last."""
    if not _has_memory(param):
        return False
    if param.dim() == 0:  # its state may be per element or per parameter
        return False
    return param.is_contiguous() or any(
        param.dim() == dims and param.is_contiguous(memory_format=order)
        for order, dims in ((torch.channels_last, 4), (torch.channels_last_3d, 5))
    )


def _fits(grad: Tensor, param: Tensor) -> bool:
    """Return True if a gradient is a plain tensor with the parameter's strides."""
    return (
        type(grad) is Tensor
        and is_plain(grad)
        and grad.dtype == param.dtype
        and grad.device == param.device
        and grad.stride() == param.stride()
    )


def _lies_alike(param: Tensor, state: dict[str, Any]) -> bool:
    """Return True if a parameter is dense and its gradient and state lie as it does, which fused kernels assume."""
    held = [value for value in (param.grad, *state.values()) if isinstance(value, Tensor) and value.dim()]
    dense = torch.empty_like(param, device="meta")
    return all(is_plain(each) and _order(each) == _order(param) for each in (dense, *held))


def _order(tensor: Tensor) -> list[tuple[int, int]]:
    """Return size and stride of each dimension with more than one element."""
    return [(size, stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def _is_part(grad: Tensor | None) -> bool:
    """Return True if a gradient is a view into longer memory."""
    if grad is None or type(grad) is not Tensor or grad.layout != torch.strided:
        return False
    return grad.untyped_storage().nbytes() > grad.numel() * grad.element_size()


def _is_of(state: dict[str, Any], param: Tensor) -> bool:
    """Return True if each entry of a state has one number per element, or one for the whole parameter."""
    tensors = [value for value in state.values() if isinstance(value, Tensor)]
    return all(value.dim() == 0 or (value.shape == param.shape and value.device == param.device) for value in tensors)


def _alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return True if two states have the same names and equal entries per parameter."""
    return one.keys() == other.keys() and all(_agree(value, other[name]) for name, value in one.items())


def _agree(value: Any, other: Any) -> bool:
    if not isinstance(value, Tensor) or not isinstance(other, Tensor):
        return type(value) is type(other) and value == other
    alike = value.dtype == other.dtype and value.device == other.device
    return alike and (value.dim() > 0 or bool(value == other))


def _sparse(param: Tensor) -> bool:
    return param.grad is not None and param.grad.layout != torch.strided


def _count_change(params: list[Tensor]) -> None:
    """Bump version counters, so that a graph that needs the old values raises."""
    try:
        torch.autograd.graph.increment_version(params)
    except RuntimeError:  # older torch: one tensor at a time
        for param in params:
            torch.autograd.graph.increment_version(param)


def _share_memory(grads: Sequence[Tensor]) -> bool:
    """Return True if the first and the last tensor share memory."""
    return _storage(grads[0]) == _storage(grads[-1])


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
