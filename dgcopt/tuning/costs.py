"""Bytes and processor seconds of a compressor, recorded from real steps of one rank without a network."""

from __future__ import annotations

import copy
import gc
import json
import math
import re
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from ..collectives import AllGather, AllReduce, AllToAll, Collective, Link, ReduceScatter
from ..comm import Comm, Handle
from ..compressors import Compressor
from ..errors import ConfigError
from ..gradients.layout import bucket_sizes
from ..gradients.optimizer import DistributedOptimizer
from ..gradients.settings import Settings
from .timeline import Method, Round
from .wire import HALF

__all__ = [
    "Conditions",
    "Recipe",
    "Recording",
    "conditions_of",
    "ddp_recipes",
    "echo",
    "load_recipes",
    "record",
    "record_recipe",
    "save_recipes",
]

LR = 1e-6
"""Learning rate of recorded steps."""
STEPS = 3
"""Recorded steps by default, after one that lays out buckets and one that allocates memory."""

LABEL = re.compile(r"(bucket .*?) round \d+")
"""A bucket's name in the label of a collective; see `exchange/scheduler.py`."""


class _Echoed(Handle):
    """A data collective that needs no other rank, and its place among the rounds of its exchange."""

    def __init__(self, collective: Collective, output: Tensor, place: int | None) -> None:
        self.collective, self.output, self.place = collective, output, place

    def done(self) -> bool:
        return True

    def result(self) -> Tensor:
        return self.output


@dataclass
class Recording:
    """One step of one rank among `size`: data collectives by round, and its own seconds between them.

    Attributes:
        rounds: by place, the collectives of all buckets: one `Round` for those of equal kind and group.
        encode: seconds of work until the first result was needed.
        decode: seconds of work after the results of each round.
        votes: waits for control messages.
        step: seconds of the bare optimizer's step, without any exchange.
    """

    size: int
    rounds: list[list[Round]] = field(default_factory=list)
    encode: float = 0.0
    decode: list[float] = field(default_factory=list)
    votes: int = 0
    step: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds of work of the whole step, backward apart."""
        return self.encode + sum(self.decode)

    def count_vote(self) -> None:
        """Count a wait for a control message."""
        self.votes += 1

    def count_seconds(self, spent: float, place: int) -> None:
        """Count seconds of work after the results of a round; before the first one if `place` is negative."""
        if place < 0 or not self.decode:
            self.encode += spent
        else:
            self.decode[place] += spent

    def add(self, place: int, collective: Collective) -> None:
        """Count a collective in its round."""
        while place >= len(self.rounds):
            self.rounds.append([])
            self.decode.append(0.0)
        kind, here = type(collective).__name__, self.rounds[place]
        if kind == "AllReduce" and collective.tensor.is_floating_point() and collective.tensor.itemsize == 2:
            kind = HALF
        for number, one in enumerate(here):
            if (one.kind, one.group) == (kind, collective.group):
                here[number] = replace(one, nbytes=one.nbytes + collective.nbytes)
                return
        here.append(Round(kind, collective.nbytes, collective.group))


class Recorder(Comm):
    """Rank 0 of `size` ranks that would all send the same as it; measures the time between its collectives."""

    wire = "recorder"

    def __init__(
        self, size: int, local_size: int, link: Link, device: torch.device, clock: Callable[[], float]
    ) -> None:
        super().__init__(0, size)
        self._set_nodes([rank // local_size for rank in range(size)])
        self.link = link
        self._device, self._clock = device, clock
        self.begin()

    def begin(self) -> None:
        """Start to record a step."""
        self.recording = Recording(self.size)
        self._sent: Counter[str] = Counter()  # collectives of each bucket
        self._current = -1  # the round whose result was used last
        self._since = self.now()

    def end(self) -> Recording:
        """Return the step recorded since `begin`."""
        self._count()
        return self.recording

    def wait(self, handle: Handle, deadline: float | None = None) -> Tensor:
        self._count()
        if handle.collective.group in ("control", "agreement"):
            self.recording.count_vote()
        elif isinstance(handle, _Echoed) and handle.place is not None:
            self._current = handle.place
        output = handle.result()
        self._since = self.now()
        return output

    def _start(self, collective: Collective, ranks: tuple[int, ...]) -> Handle:
        self._count()
        place = None
        if collective.group not in ("control", "agreement"):
            buckets = LABEL.findall(collective.label) or [collective.label]
            place = self._sent[buckets[0]]
            self._sent.update(buckets)
            self.recording.add(place, collective)
        handle = _Echoed(collective, echo(collective, len(ranks)), place)
        self._since = self.now()
        return handle

    def _among(self, members: tuple[int, ...], given: Iterable[int] | Any) -> Comm:
        return Recorder(len(members), 1, self.link or Link(), self._device, self._clock)

    def _count(self) -> None:
        """Add the time since the last collective to the phase in which it was spent."""
        self.recording.count_seconds(self.now() - self._since, self._current)

    def now(self) -> float:
        """Return the time at which the device has finished its work."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return self._clock()


def echo(collective: Collective, size: int) -> Tensor:
    """Return the result of a collective among ranks that all bring the same."""
    tensor = collective.tensor
    if isinstance(collective, AllGather):
        return tensor.expand(size, *tensor.shape).clone()
    if isinstance(collective, AllToAll):
        return tensor[:1].expand(tensor.shape).clone()
    if isinstance(collective, ReduceScatter):
        tensor = tensor[: len(tensor) // size]
    if isinstance(collective, AllReduce | ReduceScatter) and collective.op == "sum":
        return tensor * size
    return tensor.clone()


def heavy_tailed(shapes: Mapping[str, tuple[int, ...]], device: torch.device) -> dict[str, Tensor]:
    """Return gradients with the heavy tails of real ones: cubes of normal numbers, at another scale per tensor.

    The same tensors are returned for the same shapes: do not write to them.
    """
    return _made(tuple(shapes.items()), device)


@lru_cache(maxsize=1)
def _made(shapes: tuple[tuple[str, tuple[int, ...]], ...], device: torch.device) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(0)
    gradients = {}
    for name, shape in shapes:
        scale = float((torch.rand(1, generator=random) * 4 - 5).exp())
        gradients[name] = torch.randn(shape, generator=random).pow_(3).mul_(scale).to(device)
    return gradients


@contextmanager
def _without_remains() -> Iterator[None]:
    """Collect reference cycles made inside: an optimizer is in one, with the memory of a model.

    Objects made before are not searched, which takes longer than to record a small model.
    """
    frozen_by_user = gc.get_freeze_count() > 0
    if not frozen_by_user:
        gc.freeze()
    try:
        yield
    finally:
        gc.collect()
        if not frozen_by_user:
            gc.unfreeze()


@_without_remains()
def record(
    shapes: Mapping[str, tuple[int, ...]],
    compressor: Compressor,
    size: int,
    *,
    local_size: int = 1,
    link: Link | None = None,
    device: torch.device | None = None,
    make_optimizer: Callable[[Iterable[Tensor]], Optimizer] = lambda params: SGD(params, lr=LR, momentum=0.9),
    before_step: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
    steps: int = STEPS,
    **settings: Any,
) -> Recording:
    """Run a few steps of `DistributedOptimizer` on rank 0 of `size`, without any other rank, and record the fastest.

    Gradients are synthetic. Give the compressor without warm-up: the first steps are recorded.

    Args:
        shapes: parameters by name, in the order of the model.
        compressor: the exchange.
        size, local_size: number of ranks, and of those on one machine.
        link: the link that `reduce="auto"` chooses by.
        device: where gradients are; the CPU by default.
        make_optimizer: makes the optimizer; the default is SGD with momentum.
        before_step: called before each step, so that ranks on shared cores record at the same time.
        clock: `time.process_time` on a machine with other work, whose seconds it leaves out.
        steps: recorded steps, of which the fastest counts.
        settings: others of `DistributedOptimizer`.
    """
    device = torch.device("cpu") if device is None else device
    gradients = heavy_tailed(shapes, device)
    params = {name: nn.Parameter(torch.zeros(shape, device=device)) for name, shape in shapes.items()}
    optimizer = make_optimizer(params.values())
    comm = Recorder(size, local_size, link or Link(), device, clock)
    backward, step = _bare(optimizer, params, gradients, comm, before_step, steps)
    wrapped = DistributedOptimizer(optimizer, list(params.items()), copy.deepcopy(compressor), comm=comm, **settings)
    found = []
    for _ in range(2 + steps):
        wrapped.zero_grad()
        before_step()
        comm.begin()
        _arrive(params, gradients)
        wrapped.step()
        found.append(comm.end())
    best = min(found[2:], key=lambda recording: recording.seconds)
    best.encode, best.step = max(0.0, best.encode - backward), step
    return best


def _arrive(params: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> None:
    """Run a backward pass of which the gradients are given, last parameter first."""
    for name in reversed([*params]):
        torch.autograd.backward(params[name], gradients[name])


def _bare(
    optimizer: Optimizer,
    params: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor],
    comm: Recorder,
    before_step: Callable[[], None],
    steps: int,
) -> tuple[float, float]:
    """Return the seconds of that backward pass, and of a step, without any exchange."""
    backward, step = [], []
    for _ in range(1 + steps):
        optimizer.zero_grad()
        before_step()
        times = [comm.now()]
        _arrive(params, gradients)
        times.append(comm.now())
        optimizer.step()
        times.append(comm.now())
        backward.append(times[1] - times[0])
        step.append(times[2] - times[1])
    optimizer.zero_grad()
    return min(backward[1:]), min(step[1:])


@dataclass(frozen=True)
class Conditions:
    """Everything but the exchange on which recorded costs depend.

    Attributes:
        parameters: CRC-32 of names and shapes, in the order of the model.
        local_size: ranks of a machine.
        device: that has recorded, with the number of its threads if it is a CPU.
    """

    parameters: int
    local_size: int
    device: str

    def differences(self, other: Conditions) -> str:
        """Return the differences of other conditions in words."""
        found = ["names, shapes or order of parameters differ"] if other.parameters != self.parameters else []
        if other.local_size != self.local_size:
            found.append(f"--local-ranks is {other.local_size} there and {self.local_size} here")
        if other.device != self.device:
            found.append(f"the device is {other.device} there and {self.device} here")
        return ", ".join(found)


def conditions_of(
    shapes: Mapping[str, tuple[int, ...]], local_size: int, device: torch.device | None = None
) -> Conditions:
    """Return the conditions of costs that are recorded here, in this process."""
    parameters = zlib.crc32(json.dumps([(name, [*shape]) for name, shape in shapes.items()]).encode())
    if device is not None and device.type == "cuda":
        return Conditions(parameters, local_size, torch.cuda.get_device_name(device))
    return Conditions(parameters, local_size, f"a CPU with {torch.get_num_threads()} thread(s)")


@dataclass(frozen=True)
class Recipe:
    """An exchange on a model at any number of ranks: bytes `a + b / N`, seconds `a + b N`, from two recordings.

    Bytes of a message that owners share fall with N; seconds of decoding all ranks' messages grow with it.

    Attributes:
        name, overlap, in_turn: see `Method`.
        accuracy: "exact", "rounded", "delayed" (error feedback), or "lossy".
        bucket_mb, first_bucket_mb: megabytes of a bucket, and of the first one.
        low, high: recordings among the fewest ranks and among the most.
        conditions: of the recordings; None if they are not known, as in files of earlier versions.
    """

    name: str
    accuracy: str
    overlap: bool
    in_turn: bool
    bucket_mb: float
    first_bucket_mb: float
    low: Recording
    high: Recording
    conditions: Conditions | None = None

    def method(self, size: int, speed: float = 1.0) -> Method:
        """Return the exchange among `size` ranks, on a processor `speed` times as fast as the one recorded."""
        low, high = self.low, self.high
        if size in (low.size, high.size) or [*map(len, low.rounds)] != [*map(len, high.rounds)]:
            low = high = low if size <= low.size else high

        def of_bytes(one: float, other: float) -> float:
            if low.size == high.size or one == other:
                return other
            slope = (one - other) / (1 / low.size - 1 / high.size)
            return max(0.0, other + slope * (1 / size - 1 / high.size))

        def of_seconds(one: float, other: float) -> float:
            slope = 0.0 if low.size == high.size else max(0.0, other - one) / (high.size - low.size)
            return max(0.0, min(one, other) + slope * (size - low.size)) / speed

        rounds = tuple(
            tuple(replace(last, nbytes=of_bytes(first.nbytes, last.nbytes)) for first, last in zip(*both, strict=True))
            for both in zip(low.rounds, high.rounds, strict=True)
        )
        decode = tuple(map(of_seconds, low.decode, high.decode))
        encode = min(low.encode, high.encode) / speed
        return Method(self.name, rounds, encode, decode, self.overlap, high.votes, True, self.in_turn)


def record_recipe(
    name: str,
    accuracy: str,
    shapes: Mapping[str, tuple[int, ...]],
    compressor: Compressor,
    sizes: Sequence[int] = (2, 4),
    **settings: Any,
) -> Recipe:
    """Record a compressor at the least and the greatest of `sizes`; `settings` are those of `record`."""
    low, high = min(sizes), max(sizes)
    first = record(shapes, compressor, low, **settings)
    last = first if high == low else record(shapes, compressor, high, **settings)
    device = settings.get("device") or torch.device("cpu")
    overlap = compressor.overlaps(device) and not compressor.whole_model and compressor.sends == "gradient"
    named = [(one, torch.empty(shape, device=device)) for one, shape in shapes.items()]
    most, least = bucket_sizes(Settings(), compressor, named)
    return Recipe(name, accuracy, overlap, compressor.in_turn, most, least, first, last)


def ddp_recipes(
    shapes: Mapping[str, tuple[int, ...]],
    step: float,
    device: torch.device | None = None,
    before_step: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Recipe]:
    """Return the work of DistributedDataParallel with its default buckets, in float32 and with a bfloat16 hook.

    DDP divides each gradient while it copies it into its bucket; the hook rounds a bucket, and widens the sum.

    Args:
        shapes: parameters by name.
        step: seconds of the bare optimizer's step (`Recording.step`).
        device: where gradients are; the CPU by default.
        before_step, clock: as for `record`.
    """
    gradients = heavy_tailed(shapes, torch.device("cpu") if device is None else device)
    numel = sum(gradient.numel() for gradient in gradients.values())
    wide = torch.cat([gradient.flatten() for gradient in gradients.values()])
    views = wide.split([gradient.numel() for gradient in gradients.values()])
    comm = Recorder(2, 1, Link(), wide.device, clock)
    spent: tuple[list[float], list[float], list[float]] = ([], [], [])
    for _ in range(1 + STEPS):
        before_step()
        times = [comm.now()]
        for view, gradient in zip(views, gradients.values(), strict=True):
            torch.mul(gradient.view(-1), 0.5, out=view)
        times.append(comm.now())
        half = wide.to(torch.bfloat16).div_(2)
        times.append(comm.now())
        wide.copy_(half)
        times.append(comm.now())
        for seconds, start, end in zip(spent, times, times[1:], strict=False):
            seconds.append(end - start)
    filling, rounding, widening = (min(seconds[1:]) for seconds in spent)
    exact = Recording(2, [[Round("AllReduce", 4 * numel)]], filling, [step], 0, step)
    rounded = Recording(2, [[Round(HALF, 2 * numel)]], filling + rounding, [widening + step], 0, step)
    return [
        Recipe("DDP fp32", "exact", True, False, 25.0, 1.0, exact, exact),
        Recipe("DDP bf16", "rounded", True, False, 25.0, 1.0, rounded, rounded),
    ]


def save_recipes(recipes: Mapping[str, Sequence[Recipe]], path: Path) -> None:
    """Write the recipes of models as JSON. Raises ConfigError if that is not possible."""
    content = {model: [asdict(recipe) for recipe in found] for model, found in recipes.items()}
    try:
        path.write_text(json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def load_recipes(path: Path) -> dict[str, list[Recipe]]:
    """Read recipes that `save_recipes` wrote, by model. Raises ConfigError for another file."""
    try:
        content = json.loads(path.read_text())
        for row in [row for rows in content.values() for row in rows]:
            for which in ("low", "high"):
                rounds = [[Round(**one) for one in place] for place in row[which]["rounds"]]
                one = row[which] = Recording(**{**row[which], "rounds": rounds})
                nbytes = [each.nbytes for place in rounds for each in place]
                if not all(map(math.isfinite, [one.size, one.encode, *one.decode, one.votes, one.step, *nbytes])):
                    raise ValueError(f"numbers of {row['name']} are not finite")
            if row.get("conditions") is not None:
                row["conditions"] = Conditions(**row["conditions"])
        return {model: [Recipe(**row) for row in rows] for model, rows in content.items()}
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{path} holds no costs of `dgcopt advise --save-costs`: {error}") from error
