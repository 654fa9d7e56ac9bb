"""A communication hook written for torch's DistributedDataParallel, as a compressor.

Such a hook starts collectives of torch.distributed and continues in callbacks of their futures. Here it gets a process
group that records requested collectives; their futures resolve once the exchange has yielded them and received the
results. Callbacks may wait for further futures, so the hook runs in its own thread. Hook and exchange take turns: one
of them always waits for the other.
"""

from __future__ import annotations

import inspect
import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.futures import Future

from ..collectives import AllGather, AllReduce, AllToAll, Barrier, Broadcast, Collective, Op, ReduceScatter
from ..errors import ConfigError
from .base import Compressor, GradientExchange
from .context import Context

if TYPE_CHECKING:
    from torch.distributed import ReduceOp

    class ProcessGroup:
        """Declared differently by versions of torch."""

        def __init__(self, rank: int, size: int) -> None: ...
        def rank(self) -> int: ...
        def size(self) -> int: ...

elif torch.distributed.is_available():
    from torch.distributed import ProcessGroup, ReduceOp
else:
    ProcessGroup = ReduceOp = object

__all__ = ["DDPHook", "from_ddp_hook"]

Hook = Callable[[Any, Any], Any]

STEPS = "it steps parameters by itself, and DistributedOptimizer does that: give the hook inside it"

REFUSED = {
    "PostLocalSGDState": (
        "after its first steps ranks hold weights of their own, which DistributedOptimizer takes for a fault: use "
        "dgcopt.LocalSGD(..., warmup_steps=...), with DistributedOptimizer(process_set='node') for the averages within "
        "machines"
    ),
    "_OptimizerHookState": STEPS,
    "ZeroRedundancyOptimizer": STEPS,
    "_AllreduceUpcastHookState": "it is a part of DDP's own mixed precision, and asks DDP for its settings",
}
"""States or contents of torch's hooks that cannot work here, and the reason."""


def from_ddp_hook(state: Any, hook: Hook) -> Compressor:
    """Return a DDP communication hook as a compressor; takes the arguments of `register_comm_hook`.

        state = PowerSGDState(process_group=None, matrix_approximation_rank=2, start_powerSGD_iter=10)
        dgcopt.DistributedOptimizer(optimizer, model.named_parameters(), dgcopt.from_ddp_hook(state, powerSGD_hook))

    The hook sees buckets like DDP's: `index()`, `is_last()`, `buffer()`, `gradients()`, `parameters()`, `set_buffer()`.
    It must return the mean over ranks. A process group given as the state or as `state.process_group`, or None in their
    place, is replaced by one that sends over dgcopt's wire: allreduce, broadcast and barrier; allgather, reduce-scatter
    and all-to-all of equal parts. So bytes are counted, deadlines apply, and hooks run over Horovod and MPI too. A hook
    that uses torch's default group directly bypasses dgcopt: it works on the torch wire only, and its bytes are not
    counted.

    The state belongs to the caller, as with DDP: it is not copied, is not part of `optimizer.state_dict()`, and must be
    saved separately. Nothing is launched during backward, because a hook's memory cannot be rolled back if some rank's
    gradients are not finite.

    Raises ConfigError for a hook that is not callable, and for torch's hooks that cannot work here: post_localSGD_hook,
    hooks that step the optimizer, and mixed precision's. In a step: ConfigError if the hook returns no gradient,
    requests an unsupported collective, or keeps state by bucket while buckets change; and the hook's own exceptions.
    """
    if isinstance(hook, type) or not callable(hook):
        raise ConfigError(
            f"from_ddp_hook takes register_comm_hook's arguments, a state and a function, not {state!r} and {hook!r}"
        )
    for part in (state, *_made_of(hook)):
        why = REFUSED.get(type(part).__name__)
        if why is not None:
            raise ConfigError(f"{_name_of(hook)} cannot run inside DistributedOptimizer: {why}")
    return DDPHook(state, hook)


class DDPHook(Compressor):
    """The compressor that `from_ddp_hook` returns.

    Costs the cost of the hook, two copies of the gradients, and a thread per exchange.
    """

    whole_model = True  # so that the number of buckets is known
    overlap = False

    def __init__(self, state: Any, hook: Hook) -> None:
        self.state = state
        self.hook = hook
        self._group: Group | None = None
        self._last = 0
        self._layout: dict[int, list[str]] = {}

    def __repr__(self) -> str:
        state = type(self.state).__name__ if self.has_memory else "None"
        return f"DDPHook({_name_of(self.hook)}, {state})"

    def __deepcopy__(self, memo: dict[int, Any]) -> DDPHook:
        """Return a copy with the same state, which belongs to the caller, as with DDP."""
        return DDPHook(self.state, self.hook)

    def prepare(self, grads: Sequence[Tensor], contexts: Sequence[Context]) -> None:
        self._last = max(context.index for context in contexts)

    def exchange(self, grad: Tensor, ctx: Context) -> GradientExchange:
        self._check_layout(ctx)
        bucket = HookBucket(grad, ctx, ctx.index == self._last)
        state = self._joined(ctx)
        result = yield from Turns(lambda: self.hook(state, bucket), grad.device).exchange()
        if isinstance(result, list | tuple) and len(result) == 1:  # the form of torch's futures of collectives
            (result,) = result
        if not isinstance(result, Tensor) or result.numel() != bucket.numel:
            found = f"a tensor of shape {tuple(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
            raise ConfigError(
                f"{_name_of(self.hook)} must return a future of the averaged gradient, a tensor of {bucket.numel} "
                f"elements, not {found}"
            )
        parts = result.reshape(-1).split([segment.numel for segment in ctx.segments])
        for segment, part in zip(ctx.segments, parts, strict=True):
            grad[segment.start : segment.stop] = part
        return grad if ctx.op == "average" else grad.mul_(ctx.size)

    @property
    def has_memory(self) -> bool:
        """True if the hook has a state of its own, in which it may keep memory."""
        return self.state is not None and not isinstance(self.state, ProcessGroup)

    def _check_layout(self, ctx: Context) -> None:
        names = [segment.name for segment in ctx.segments]
        if self._layout.setdefault(ctx.index, names) != names and self.has_memory:
            raise ConfigError(
                f"{_name_of(self.hook)} keeps memory by bucket number, but the buckets have changed, because the "
                f"trained parameters changed or state was loaded. Wrap the optimizer again with a new "
                f"{type(self.state).__name__}, or use one of dgcopt's compressors, whose memory follows parameters."
            )

    def _joined(self, ctx: Context) -> Any:
        """Return the hook's state with its process group replaced by one of the exchanging ranks."""
        given = getattr(self.state, "process_group", None) if self.has_memory else self.state
        if isinstance(given, ProcessGroup) and given is not self._group and given.size() != ctx.size:
            raise ConfigError(
                f"the process group of {_name_of(self.hook)} has {given.size()} ranks, but the optimizer exchanges "
                f"among {ctx.size}. Give DistributedOptimizer the same ranks as process_set."
            )
        if self._group is None or (self._group.rank(), self._group.size()) != (ctx.rank, ctx.size):
            self._group = Group(ctx.rank, ctx.size)
        if not self.has_memory:
            return self._group
        if hasattr(self.state, "process_group"):
            self.state.process_group = self._group
        return self.state


class HookBucket:
    """The interface of `torch.distributed.GradBucket` for hooks in Python."""

    def __init__(self, grad: Tensor, ctx: Context, is_last: bool) -> None:
        spans = [grad[segment.start : segment.stop] for segment in ctx.segments]
        self._index, self._is_last = ctx.index, is_last
        self._buffer = torch.cat(spans)  # without gaps, as in DDP
        self._params = [segment.param for segment in ctx.segments]
        self.numel = len(self._buffer)

    def index(self) -> int:
        """Return the index of the bucket in the step."""
        return self._index

    def is_last(self) -> bool:
        """Return True for the last bucket of the step."""
        return self._is_last

    def buffer(self) -> Tensor:
        """Return all gradients as one flat tensor."""
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Replace the gradients by a tensor of equal length and any dtype."""
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        """Return the gradients in the parameters' shapes, contiguous as in DDP, which ignores channels-last order."""
        spans = self._buffer.split([param.numel() for param in self._params])
        return [span.view(param.shape) for span, param in zip(spans, self._params, strict=True)]

    def parameters(self) -> list[Tensor]:
        """Return the parameters."""
        return self._params


class Turns:
    """A hook in a thread, and an exchange that yields the collectives requested by it.

    Args:
        program: calls the hook, returns its future.
        device: device of the gradients.
    """

    here = threading.local()
    """Thread-local: the running `Turns`."""

    def __init__(self, program: Callable[[], Any], device: torch.device) -> None:
        self._program = program
        self._on_device = torch.cuda.stream(torch.cuda.current_stream(device)) if device.type == "cuda" else None
        self._asked: deque[tuple[Collective, Later]] = deque()
        self._said: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._heard: queue.SimpleQueue[Tensor | None] = queue.SimpleQueue()

    def exchange(self) -> Generator[Collective, Tensor, Any]:
        """Yield collectives, receive their results, and return the final value of the hook's future."""
        threading.Thread(target=self._run, name="dgcopt DDP hook", daemon=True).start()
        try:
            while True:
                event, value = self._said.get()
                if event == "failed":
                    raise value
                if event == "done":
                    return value
                self._heard.put((yield value))
        finally:
            self._heard.put(None)  # unblock a hook that still waits

    # -- the hook's thread -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _run(self) -> None:
        Turns.here.now = self
        try:
            with self._on_device or nullcontext():
                future = self._program()
                is_future = hasattr(future, "wait")  # torch has several classes of futures
                while is_future and self._asked and not future.done():
                    self._next()
                self._said.put(("done", future.wait() if is_future else future))
        except BaseException as error:  # raised again in the exchange
            self._said.put(("failed", error))

    def ask(self, collective: Collective, finish: Callable[[Tensor], Any]) -> Later:
        """Request a collective; `finish` turns its result into the future's value."""
        later = Later(self, finish)
        if collective.tensor.numel() or isinstance(collective, Barrier):
            self._asked.append((collective, later))
        else:
            later.arrived(collective.tensor)
        return later

    def until(self, later: Later) -> None:
        """Wait for a future."""
        while not later.done() and self._asked:
            self._next()

    def _next(self) -> None:
        collective, later = self._asked.popleft()
        self._said.put(("asks", collective))
        result = self._heard.get()
        if result is None:
            raise ConfigError("the step was aborted")
        later.arrived(result)


class Later(Future):
    """A future with a `wait()` that resumes the exchange, and with callbacks in the hook's thread."""

    def __init__(self, turns: Turns, finish: Callable[[Tensor], Any] = lambda result: result) -> None:
        super().__init__()
        self._turns = turns
        self._finish = finish

    def arrived(self, result: Tensor) -> None:
        """Resolve the future with the collective's result."""
        self.set_result(self._finish(result))

    def then(self, callback: Callable[[Any], Any]) -> Later:
        """Return a future of the callback's result."""
        after = Later(self._turns)

        def call(_: Any) -> None:
            try:
                after.set_result(callback(self))
            except Exception as error:  # raised by wait()
                after.set_exception(error)

        self.add_done_callback(call)
        return after

    def wait(self) -> Any:
        """Return the value; blocks until it is known."""
        self._turns.until(self)
        return super().wait()


class Asked:
    """The result of a group's collective: the part of `torch.distributed.Work` that hooks use."""

    def __init__(self, later: Later) -> None:
        self._later = later

    def get_future(self) -> Later:
        return self._later

    def wait(self, timeout: Any = None) -> bool:
        self._later.wait()
        return True

    def is_completed(self) -> bool:
        return self._later.done()


class Group(ProcessGroup):
    """A torch process group with collectives of the running exchange."""

    def getBackendName(self) -> str:
        return "dgcopt"

    def allreduce(self, tensors: Any, opts: Any = None) -> Asked:
        (tensor,) = [tensors] if isinstance(tensors, Tensor) else tensors
        op = _op(ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts))
        return _ask(AllReduce(tensor, op=op), lambda result: [_into(tensor, result)])

    def broadcast(self, tensors: Any, opts: Any = None) -> Asked:
        (tensor,) = [tensors] if isinstance(tensors, Tensor) else tensors
        root = opts if isinstance(opts, int) else getattr(opts, "rootRank", 0)
        return _ask(Broadcast(tensor, root=root), lambda result: [_into(tensor, result)])

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Asked:
        (rows,), (tensor,) = outputs, inputs

        def finish(result: Tensor) -> list[Tensor]:
            for row, part in zip(rows, result, strict=True):
                row.copy_(part)
            return [result]  # the form of NCCL's futures, expected by torch's own hooks

        return _ask(AllGather(tensor), finish)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Asked:
        return _ask(AllGather(tensor), lambda result: [_into(output, result.view(output.shape))])

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Asked:
        op = _op(getattr(opts, "reduceOp", ReduceOp.SUM))
        return _ask(ReduceScatter(tensor.reshape(-1), op=op), lambda result: [_into(output, result.view(output.shape))])

    def all_to_all_single(self, output: Tensor, tensor: Tensor, *sizes_and_opts: Any) -> Asked:
        if any(isinstance(sizes, list) and len(set(sizes)) > 1 for sizes in sizes_and_opts):
            raise ConfigError("a DDP hook requests an all-to-all of unequal parts, which dgcopt's wires do not support")
        rows = tensor.reshape(self.size(), -1)
        return _ask(AllToAll(rows), lambda result: [_into(output, result.view(output.shape))])

    def barrier(self, opts: Any = None) -> Asked:
        return _ask(Barrier(), lambda result: [])

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single


def _refuse(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise ConfigError(f"a DDP hook requests {name} from its process group, which from_ddp_hook does not support")

    return refuse


for _name in ("allreduce_coalesced", "allgather_coalesced", "alltoall", "gather", "scatter", "reduce", "send", "recv"):
    setattr(Group, _name, _refuse(_name))


def _ask(collective: Collective, finish: Callable[[Tensor], Any]) -> Asked:
    turns: Turns | None = getattr(Turns.here, "now", None)
    if turns is None:
        raise ConfigError("the process group of from_ddp_hook works only during a call of the hook")
    return Asked(turns.ask(collective, finish))


def _into(tensor: Tensor, result: Tensor) -> Tensor:
    """Write a collective's result to the tensors that torch's own would use."""
    return tensor if tensor.data_ptr() == result.data_ptr() else tensor.copy_(result)


def _op(op: Hashable) -> Op:
    """Return the wire's name of a reduction. Raises ConfigError for an unsupported one."""
    ops: list[tuple[Any, Op]] = [
        (ReduceOp.SUM, "sum"),
        (ReduceOp.AVG, "average"),
        (ReduceOp.MIN, "min"),
        (ReduceOp.MAX, "max"),
    ]
    for theirs, ours in ops:
        if op == theirs:
            return ours
    raise ConfigError("a DDP hook requests an unsupported reduction: use sum, average, min or max")


def _made_of(hook: Any) -> list[Any]:
    """Return a hook, and the hooks and states in the closures of torch's wrappers of hooks."""
    found = [hook]
    for each in found:  # grows during the loop
        inside = inspect.getclosurevars(each).nonlocals.values() if inspect.isfunction(each) else ()
        found += [thing for thing in inside if all(thing is not known for known in found)]
    return found


def _name_of(hook: Any) -> str:
    return getattr(hook, "__qualname__", None) or _name_of(getattr(hook, "func", type(hook)))
