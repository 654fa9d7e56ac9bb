"""DistributedOptimizer: any torch optimizer, averaging its gradients over ranks before it steps."""

from __future__ import annotations

import collections
import copy
import functools
import hashlib
import itertools
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from .collectives import AllGather, AllReduce
from .comm import Comm, Handle, current_comm
from .compressors import Compressor, NoCompression
from .engine import Engine, Telemetry
from .errors import ConfigError, MismatchError

__all__ = ["DistributedOptimizer"]

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)

STATE_KEY = "dgcopt"
"""Where `state_dict()` keeps what dgcopt adds."""


def DistributedOptimizer(
    optimizer: AnyOptimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: Compressor | None = None,
    backward_passes_per_step: int = 1,
    op: Literal["average", "sum"] = "average",
    *,
    comm: Comm | None = None,
    bucket_mb: float = 25.0,
    first_bucket_mb: float = 1.0,
) -> AnyOptimizer:
    """Make `optimizer` average its gradients over all ranks, compressed, while backward still runs.

    The very object comes back: its class becomes a subclass of the one it had, so schedulers, GradScaler and other
    references keep working. It gains `synchronize()`, `skip_synchronize()`, `no_sync()`,
    `set_backward_passes_per_step()`, `telemetry`, `compressor` and `residual_norm()`. In a single process nothing is
    hooked and nothing sent.

    Args:
        optimizer: any `torch.optim.Optimizer`.
        named_parameters: `model.named_parameters()`, for errors and checkpoints that name parameters. None numbers
            them by group and position.
        compression: how gradients travel; None sends them as they are. The optimizer takes a copy of its own.
        backward_passes_per_step: gradients of so many backward passes are added up before they are exchanged.
        op: "average" or "sum" over ranks.
        comm: the wire; None is the one of `dgcopt.init()`.
        bucket_mb, first_bucket_mb: megabytes of gradient per bucket. Larger costs overlap, smaller costs messages.

    Raises ConfigError for parameters that have no name, two with one name, or that cannot be trained, and for
    settings out of range; MismatchError if ranks differ in parameters or settings.
    """
    if getattr(optimizer, "_engine", None) is not None:
        raise ConfigError("this optimizer is distributed already: wrap it once")
    for name, value in (("bucket_mb", bucket_mb), ("first_bucket_mb", first_bucket_mb)):
        if not value > 0:
            raise ConfigError(f"{name} must be positive, not {value!r}")
    if op not in ("average", "sum"):
        raise ConfigError(f'op must be "average" or "sum", not {op!r}')
    if compression is not None and not isinstance(compression, Compressor):
        raise ConfigError(f"compression must be a dgcopt.Compressor such as dgcopt.DGC(), not {compression!r}")
    given = _given_names(named_parameters)
    names = _unique_names(optimizer, given)
    _check_trainable(names)
    passes = _check_passes(backward_passes_per_step)

    comm = current_comm() if comm is None else comm
    compressor = copy.deepcopy(compression) if compression is not None else NoCompression()
    description = _describe(optimizer, names, compressor, passes, op, bucket_mb, first_bucket_mb)
    optimizer.__class__ = _subclass(type(optimizer))  # type: ignore[assignment, arg-type]
    assert isinstance(optimizer, _Distributed)
    optimizer.comm = comm
    optimizer.compressor = compressor
    optimizer._parameter_names = names
    optimizer._given_names = given or {}
    optimizer._passes = passes
    optimizer._agreement = None
    optimizer._forget_step()
    if comm.size > 1:
        compressor.attach(optimizer)
        megabyte = 1024 * 1024
        optimizer._engine = Engine(
            names, compressor, comm, op, int(bucket_mb * megabyte), int(first_bucket_mb * megabyte)
        )
        optimizer._agreement = _Agreement(comm, description)
        if not comm.constructs_in_turn:
            optimizer._check_agreement()
        optimizer._hook_parameters()
        optimizer.register_step_pre_hook(_before_step)
        optimizer.register_step_post_hook(_after_step)
        optimizer.register_state_dict_post_hook(_save_state)
        optimizer.register_load_state_dict_pre_hook(_load_state)
    return optimizer


class _Distributed(Optimizer):
    """What the wrapped optimizer's class gains; never instantiated."""

    comm: Comm
    compressor: Compressor
    _engine: Engine | None = None
    _parameter_names: dict[Tensor, str]
    _given_names: dict[Tensor, str]
    _agreement: _Agreement | None
    _passes: int
    _passes_left: dict[Tensor, int]
    _hooked: set[Tensor]
    _synchronizing = True
    _accumulating = False
    _synchronized = False

    # -- exchanging --------------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Wait until every parameter's gradient is the average over ranks. `step()` does it by itself.

        Call it to change averaged gradients before the step, and step inside `skip_synchronize()`. Called again
        before the next backward pass, it does nothing.
        """
        if self._engine is not None and not self._synchronized:
            self._check_agreement()
            self._hook_parameters()
            self._engine.synchronize()
            self._passes_left = {}
            self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within it, `step()` uses the gradients as they are, after `synchronize()` was called by hand."""
        self._synchronizing = False
        try:
            yield
        finally:
            self._synchronizing = True

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, backward passes only add up: nothing is sent, and no pass is counted."""
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before

    def set_backward_passes_per_step(self, passes: int) -> None:
        """How many backward passes are added up before gradients are exchanged, from the next step on."""
        self._passes = _check_passes(passes)
        self._passes_left = {}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As `torch.optim.Optimizer.zero_grad`. Raises RuntimeError while gradients are on their way."""
        if self._engine is not None and self._engine.in_flight:
            raise RuntimeError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(): gradients are on their way to other ranks. Call it before the backward "
                "pass or after the step."
            )
        super().zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As `torch.optim.Optimizer.add_param_group`; the new parameters are exchanged from the next step on."""
        super().add_param_group(param_group)
        if self._engine is not None:
            group = len(self.param_groups) - 1
            for place, param in enumerate(self.param_groups[-1]["params"]):
                self._parameter_names[param] = self._given_names.get(param, _number(group, place))
            _check_trainable(self._parameter_names)
            self._hook_parameters()

    # -- looking -----------------------------------------------------------------------------------------------------

    @property
    def telemetry(self) -> Telemetry:
        """Bytes and seconds so far; all zero in a single process."""
        return self._engine.telemetry if self._engine is not None else Telemetry()

    def residual_norm(self) -> float:
        """Euclidean norm of what this rank holds back; 0.0 for compressors that hold nothing back."""
        return self._engine.residual_norm() if self._engine is not None else 0.0

    # -- hooks -------------------------------------------------------------------------------------------------------

    def _check_agreement(self) -> None:
        """Compare parameters and settings over ranks, once."""
        if self._agreement is not None:
            self._agreement.check()
            self._agreement = None

    def _forget_step(self) -> None:
        self._passes_left = {}
        self._hooked = set()
        self._synchronized = False

    def _hook_parameters(self) -> None:
        """Watch every parameter that is trained and not watched yet."""
        for param in self._parameter_names:
            if param.requires_grad and param not in self._hooked:
                self._hooked.add(param)
                param.register_post_accumulate_grad_hook(self._gradient_arrived)

    def _gradient_arrived(self, param: Tensor) -> None:
        assert self._engine is not None
        self._synchronized = False
        if self._accumulating:
            return
        left = self._passes_left.get(param, self._passes) - 1
        if left < 0 or self._engine.is_in(param):
            name = self._parameter_names[param]
            raise RuntimeError(
                f"rank {self.comm.rank}: the gradient of parameter {name!r} was computed {self._passes - left} times "
                f"before step(), but backward_passes_per_step is {self._passes}. Raise it "
                f"(set_backward_passes_per_step), do all but the last pass inside no_sync(), or call step() after "
                f"each backward pass."
            )
        self._passes_left[param] = left
        if left == 0:
            self._engine.ready(param)


def _before_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Average gradients, or let the closure do it; runs also where a scheduler kept the unwrapped `step`."""
    assert isinstance(optimizer, _Distributed)
    has_self = bool(args) and args[0] is optimizer
    place = 1 if has_self else 0
    closure = args[place] if len(args) > place else kwargs.get("closure")
    if closure is None:
        if optimizer._synchronizing:
            if optimizer._synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(): the gradients are averaged already and are not sent again. Step inside "
                    "`with optimizer.skip_synchronize():` to say so.",
                    stacklevel=3,
                )
            else:
                optimizer.synchronize()
        optimizer._synchronized = False
        optimizer.compressor.before_step(optimizer)
        return None
    averaged = functools.partial(_averaged_closure, optimizer, closure)
    if len(args) > place:
        return (*args[:place], averaged, *args[place + 1 :]), kwargs
    return args, {**kwargs, "closure": averaged}


def _averaged_closure(optimizer: _Distributed, closure: Callable[[], Any]) -> Any:
    """The closure, then the mean of its loss over ranks, so that line searches decide alike everywhere."""
    loss = closure()
    if optimizer._synchronizing:
        optimizer.synchronize()
        optimizer._synchronized = False
        if isinstance(loss, Tensor | float | int):
            value = torch.as_tensor(loss, dtype=torch.float64).detach().reshape(-1).clone()
            mean = optimizer.comm.run(AllReduce(optimizer.comm.to_wire(value), op="average", label="loss"))
            loss = mean.reshape(loss.shape).to(loss) if isinstance(loss, Tensor) else float(mean)
    optimizer.compressor.before_step(optimizer)
    return loss


def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    assert isinstance(optimizer, _Distributed)
    optimizer.compressor.after_step(optimizer)


def _save_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    assert isinstance(optimizer, _Distributed) and optimizer._engine is not None
    engine = optimizer._engine
    state_dict[STATE_KEY] = {
        "rank": optimizer.comm.rank,
        "world_size": optimizer.comm.size,
        "step": engine.step,
        "order": engine.order(),
        "memory": engine.memory(),
    }


def _load_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
    assert isinstance(optimizer, _Distributed) and optimizer._engine is not None
    if STATE_KEY not in state_dict:
        return None
    state = state_dict[STATE_KEY]
    if (state["rank"], state["world_size"]) != (optimizer.comm.rank, optimizer.comm.size):
        raise ConfigError(
            f"this state belongs to rank {state['rank']} of {state['world_size']} and cannot be loaded on rank "
            f"{optimizer.comm.rank} of {optimizer.comm.size}: each rank keeps what it has not sent yet. Load the "
            f"state that this rank saved (dgcopt.checkpoint does), or delete state_dict[{STATE_KEY!r}] to do without."
        )
    optimizer._engine.restore(state["memory"], state["order"], state["step"])
    return {key: value for key, value in state_dict.items() if key != STATE_KEY}


@functools.cache
def _subclass(base: type[Optimizer]) -> type[Optimizer]:
    """The class that a wrapped `base` gets: the same name, with the methods above."""
    return type(base.__name__, (_Distributed, base), {"__doc__": base.__doc__, "__module__": base.__module__})


# -- names, settings, and whether all ranks have the same ------------------------------------------------------------


def _number(group: int, place: int) -> str:
    return f"group{group}.parameter{place}"


def _given_names(named_parameters: Iterable[tuple[str, Tensor]] | None) -> dict[Tensor, str] | None:
    """The user's names by parameter; those of parameters that the optimizer gets later are welcome."""
    if named_parameters is None:
        return None
    given = list(named_parameters)
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in given):
        raise ConfigError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters()"
        )
    counts = collections.Counter(name for name, _ in given)
    duplicates = sorted(name for name, count in counts.items() if count > 1)
    if duplicates:
        raise ConfigError(
            f"parameter names in named_parameters must be unique; found duplicates: {', '.join(duplicates)}. Prefix "
            f"the names when you chain the parameters of several modules."
        )
    return {param: name for name, param in given}


def _unique_names(optimizer: Optimizer, given: dict[Tensor, str] | None) -> dict[Tensor, str]:
    """Every parameter of the optimizer with its name, in the optimizer's order."""
    own = [
        (_number(group, place), param)
        for group, settings in enumerate(optimizer.param_groups)
        for place, param in enumerate(settings["params"])
    ]
    if given is None:
        return {param: name for name, param in own}
    unnamed = [(place, param) for place, param in own if param not in given]
    if unnamed:
        raise ConfigError(
            f"named_parameters was specified, but {len(unnamed)} parameter(s) of the optimizer were not named: "
            + ", ".join(f"{place} of shape {tuple(param.shape)}" for place, param in unnamed[:5])
            + ". Pass the names of all parameters given to the optimizer, or none."
        )
    return {param: given[param] for _, param in own}


def _check_trainable(names: dict[Tensor, str]) -> None:
    for param, name in names.items():
        if not param.is_floating_point():
            raise ConfigError(
                f"parameter {name!r} has dtype {str(param.dtype).removeprefix('torch.')}: only floating-point "
                f"parameters can be averaged. Do not give it to the optimizer."
            )
        if param.numel() >= 2**31:
            raise ConfigError(f"parameter {name!r} has {param.numel()} elements; at most 2^31 - 1 can be indexed")
    if names and not any(param.requires_grad for param in names):
        raise ConfigError("none of the optimizer's parameters requires a gradient: there is nothing to train")


def _check_passes(passes: int) -> int:
    if isinstance(passes, bool) or not isinstance(passes, int) or passes < 1:
        raise ConfigError(f"backward_passes_per_step must be a whole number of at least 1, not {passes!r}")
    return passes


def _describe(
    optimizer: Optimizer,
    names: dict[Tensor, str],
    compressor: Compressor,
    passes: int,
    op: str,
    bucket_mb: float,
    first_bucket_mb: float,
) -> list[str]:
    """Everything that must be equal on all ranks, a line each."""
    return [
        f"optimizer: {type(optimizer).__name__}",
        f"compression: {re.sub(' at 0x[0-9a-f]+', '', repr(compressor))}",
        f"backward_passes_per_step: {passes}",
        f"op: {op}",
        f"bucket_mb: {bucket_mb}, first_bucket_mb: {first_bucket_mb}",
        f"number of parameters: {len(names)}",
        *(
            f"parameter {name}: {str(param.dtype).removeprefix('torch.')} {tuple(param.shape)} strides "
            f"{param.stride()}{'' if param.requires_grad else ', frozen'}"
            for param, name in names.items()
        ),
    ]


class _Agreement:
    """Compares what must be equal on all ranks: a hash first, the words only if hashes differ."""

    def __init__(self, comm: Comm, lines: list[str]) -> None:
        self.comm = comm
        self.lines = lines
        digest = bytearray(hashlib.sha256("\n".join(lines).encode()).digest())
        self._handle: Handle = comm.start(self._bytes(digest, "hash of parameters and settings"))

    def _bytes(self, data: bytearray, label: str) -> AllGather:
        return AllGather(self.comm.to_wire(torch.frombuffer(data, dtype=torch.uint8)), label=label)

    def check(self) -> None:
        """Raises MismatchError on every rank if any differs from rank 0, saying where first."""
        hashes = self.comm.wait(self._handle).cpu()
        others = [rank for rank in range(self.comm.size) if not torch.equal(hashes[rank], hashes[0])]
        if not others:
            return
        if self.comm.constructs_in_turn:
            raise MismatchError(f"rank(s) {others} have other parameters or settings than rank 0")
        text = "\n".join(self.lines).encode()
        lengths = self.comm.run(AllGather(self.comm.to_wire(torch.tensor([len(text)])), label="lengths")).flatten()
        padded = bytearray(text.ljust(int(lengths.max()), b"\n"))
        rows = self.comm.run(self._bytes(padded, "parameters and settings")).cpu()
        told = [bytes(row.tolist()).decode(errors="replace").rstrip("\n").split("\n") for row in rows]
        differences = []
        for rank in others[:4]:
            for here, there in itertools.zip_longest(told[0], told[rank], fillvalue="(nothing)"):
                if here != there:
                    differences.append(f"rank 0 has [{here}], rank {rank} has [{there}]")
                    break
        raise MismatchError(
            f"ranks disagree, seen on rank {self.comm.rank}: {'; '.join(differences)}. Build the same model with the "
            f"same settings on every rank."
        )
