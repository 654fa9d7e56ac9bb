"""DiLoCo: an outer optimizer whose gradient is what H local steps have changed, sent by any compressor."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Optimizer

from ..checkpoint import STATE_KEY
from ..checks import check_positive, check_whole
from ..collectives import Barrier
from ..comm import Comm, Handle
from ..compressors import ChunkedTopK, Compressor
from ..compressors.context import at_least_float32
from ..compressors.frozen_adam import FrozenAdam
from ..compressors.schedule import Warmup
from ..errors import ConfigError
from ..exchange.parameters import given_names, unique_names
from ..exchange.telemetry import Telemetry
from ..flat.buckets import Bucket
from ..gradients.optimizer import DistributedOptimizer
from .base import Averaging
from .rounds import KEY, Rounds, is_finite
from .weights import Weights

__all__ = ["DiLoCo", "Outer", "OuterRounds", "SparseLoCo"]

Outer: TypeAlias = Callable[[Iterable[Tensor]], Optimizer]
"""Makes an optimizer of parameters: a class of torch.optim with its settings, by functools.partial."""


class DiLoCo(Averaging):
    """Every H local steps, an outer optimizer steps by the mean of what the ranks have changed.

        after step t, H | t:  g = mean_i (a - x_i), compressed;  a <- outer(a, g);  x_i <- a + alpha (x_i - a)

    where the anchor a is what all ranks have had in common since the last such step. With H = 1, outer SGD(lr=1)
    without momentum and no compression this is dense data-parallel SGD; the inner optimizer's state stays local.

    The outer step is that of a `DistributedOptimizer` over the anchors. So any compressor fits, with its own momentum
    correction, error feedback and warm-up, which then count outer steps.

    Args:
        every: H, local steps between two outer steps of a parameter. Larger sends less; beyond some hundreds the loss
            suffers.
        outer: makes the outer optimizer of the anchors: any torch.optim class but LBFGS, in a functools.partial with
            its settings. None is SGD(lr=0.7, momentum=0.9, nesterov=True). A smaller lr if H is small.
        compression: how outer gradients travel; None sends them as they are.
        fragments: Streaming DiLoCo: so many parts of the model, of about equal size, take turns, one every
            H / fragments steps, so that no step has to send all of it. Must divide `every`.
        delay: local steps that a fragment's exchange may take, in which training goes on. Its outer gradient is that
            old when it is applied, and what those steps changed is given up unless alpha keeps some of it. Less than
            `every / fragments`.
        alpha: how much of its own weights a rank keeps, in [0, 1]: 0 makes all ranks equal, 1 only moves the anchor.
        warmup_steps: so many steps of dense data-parallel training first.

    Costs, every H steps, what `compression` costs for one gradient. Memory: the anchor (in float32 if weights are of
    half precision), the outer optimizer's state, and the outer gradient while it is exchanged. After an outer step all
    ranks hold the same bits if alpha is 0 and there is one fragment.

    Raises ConfigError for settings out of range, and for a compressor that has to see every step's gradient.
    Sources: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", arXiv:2311.08105,
    Algorithm 1; Douillard et al., "Streaming DiLoCo with overlapping communication", arXiv:2501.18512.
    """

    def __init__(
        self,
        every: int = 100,
        outer: Outer | None = None,
        compression: Compressor | None = None,
        fragments: int = 1,
        delay: int = 0,
        alpha: float = 0.0,
        warmup_steps: int = 0,
    ) -> None:
        self.every = check_whole(every, "every", 1)
        self.outer = partial(SGD, lr=0.7, momentum=0.9, nesterov=True) if outer is None else outer
        self.compression = compression
        self.fragments = check_whole(fragments, "fragments", 1)
        self.delay = check_whole(delay, "delay", 0)
        self.alpha = alpha
        self.warmup_steps = check_whole(warmup_steps, "warmup_steps", 0)
        if every % fragments:
            raise ConfigError(f"every must be a multiple of fragments, as each takes its turn: {every} of {fragments}")
        if delay >= self.interval:
            raise ConfigError(
                f"delay must be less than every / fragments, or two fragments would be on their way: {delay} of "
                f"{self.interval}"
            )
        if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 <= alpha <= 1:
            raise ConfigError(f"alpha must be a number from 0 to 1, not {alpha!r}")
        if not callable(self.outer):
            raise ConfigError(f"outer must make an optimizer, such as partial(SGD, lr=0.7), not {outer!r}")
        if isinstance(compression, FrozenAdam):
            raise ConfigError(
                f"{type(compression).__name__} learns Adam's second moments from every step's gradient, and outer "
                f"gradients come every {every} steps: choose another compressor, such as DGC or PowerSGD"
            )

    @property
    def interval(self) -> int:
        """Local steps from one fragment's turn to the next one's."""
        return self.every // self.fragments

    def due(self, step: int) -> bool:
        return step % self.interval == 0

    def identical(self, step: int) -> bool:
        return self.due(step) and self.fragments == 1 and self.alpha == 0

    def set_steps_per_epoch(self, steps: int) -> None:
        if self.compression is not None:
            self.compression.set_steps_per_epoch(max(1, steps // self.every))

    def _rounds(
        self, optimizer: Optimizer, named_parameters: Iterable[tuple[str, Tensor]] | None, comm: Comm | None
    ) -> Rounds:
        return OuterRounds(self, optimizer, named_parameters, comm)


class SparseLoCo(DiLoCo):
    """DiLoCo that sends the largest coordinates of each chunk in 2 bits, with error feedback.

    The error feedback forgets a little each time, and takes the place of the outer momentum. What an outer step does
    not send is taken back from the weights; at the start that is nearly all that was learned, so the first send more.

    Args:
        every: H, as for DiLoCo.
        ratio: fraction of each chunk's coordinates that is sent.
        chunk: coordinates per chunk.
        decay: what is left of the error after each round.
        lr: of the outer SGD.
        warmup_steps: so many steps of dense data-parallel training first.
        warmup: what the ratio is in the first outer steps, one after another; more of them if the loss rises when they
            are over. The paper has none.

    Costs, every H steps, an allgather of about 0.02 bytes per parameter at the defaults. Source: Sarfi et al.,
    "Communication Efficient LLM Pre-training with SparseLoCo", arXiv:2508.15706, Algorithm 1.
    """

    def __init__(
        self,
        every: int = 30,
        ratio: float = 1 / 64,
        chunk: int = 4096,
        decay: float = 0.95,
        lr: float = 1.0,
        warmup_steps: int = 0,
        warmup: Sequence[float] = (1.0, 0.25, 0.0625),
    ) -> None:
        if not isinstance(warmup, list | tuple):
            raise ConfigError(f"warmup must be a list of ratios, such as (1.0, 0.25), or () for none, not {warmup!r}")
        schedule = Warmup(tuple(warmup), steps=1) if warmup else None
        code = ChunkedTopK(ratio, chunk, decay=decay, source="gradient", warmup=schedule)
        super().__init__(every, partial(SGD, lr=check_positive(lr, "lr")), code, warmup_steps=warmup_steps)


class OuterRounds(Rounds):
    """DiLoCo on one rank: an outer optimizer per fragment, each a DistributedOptimizer of its anchors.

    Attributes: `outers`, those optimizers.
    """

    rule: DiLoCo

    def __init__(
        self,
        rule: DiLoCo,
        optimizer: Optimizer,
        named_parameters: Iterable[tuple[str, Tensor]] | None,
        comm: Comm | None,
    ) -> None:
        self._anchors: dict[Tensor, nn.Parameter] = {}
        self._anchored: set[Tensor] = set()  # those whose anchor is where local steps have started from
        self._departed: int | None = None  # the fragment that is on its way
        self._outgoing: dict[str, Tensor] = {}  # its gradient, if a checkpoint may come before the exchange ends
        self._moved = 0  # the last local step that this rank has made itself
        self.outers: list[Any] = []
        named = None if named_parameters is None else list(named_parameters)
        for params in _split(list(unique_names(optimizer, given_names(named))), rule.fragments):
            anchors = {param: _anchor(param) for param in params}
            outer = rule.outer(list(anchors.values()))
            if not isinstance(outer, Optimizer) or isinstance(outer, LBFGS):
                raise ConfigError(f"outer must make an optimizer that steps without a closure, not {outer!r}")
            self._anchors |= anchors
            self.outers.append(outer)
        super().__init__(rule, optimizer, named, comm)
        for outer in self.outers:
            mine = {param for group in outer.param_groups for param in group["params"]}
            names = [(self.names[param], anchor) for param, anchor in self._anchors.items() if anchor in mine]
            DistributedOptimizer(outer, names, rule.compression, comm=self.comm)

    @property
    def telemetry(self) -> Telemetry:
        total = copy.copy(super().telemetry)
        for outer in self.outers:
            for name, value in vars(outer.telemetry).items():
                if name not in ("steps", "dense_bytes"):  # which are those of local steps
                    setattr(total, name, getattr(total, name) + value)
        return total

    def residual_norm(self) -> float:
        """Euclidean norm of what this rank's compressors hold back of the outer gradients."""
        return float(torch.tensor([outer.residual_norm() for outer in self.outers]).norm())

    # -- an outer step -----------------------------------------------------------------------------------------------

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if getattr(optimizer, "_raw", False):
            return
        self._moved = self._local_step + 1
        super()._after_step(optimizer, args, kwargs)
        arrival = self._local_step + self.rule.delay
        if self.rule.delay and self._local_step > 0 and self.rule.due(arrival) and not self._joining:
            self._depart(self._turn(arrival))

    def _turn(self, step: int) -> int:
        """Whose turn it is at a local step."""
        return (step // self.rule.interval - 1) % self.rule.fragments

    def _launch(self) -> None:
        if self._departed is None:
            self._depart(self._turn(self._local_step))

    @torch.no_grad()
    def _depart(self, fragment: int, again: bool = False) -> None:
        """Give the outer optimizer its gradient, what local steps have changed, and start to exchange it.

        `again` takes the one that was on its way when state was saved.
        """
        self._departed = fragment
        outer, saved = self.outers[fragment], self._outgoing if again else {}
        for param, anchor in self._of(fragment):
            anchor.requires_grad_(self._may_differ(param))
            if anchor.requires_grad:
                # from what the anchor was when it was written to the weights, or its rounding would count as a change
                change = anchor.to(param.dtype).to(anchor.dtype) - param
                anchor.grad = saved.get(self.names[param], change.mul_(self._weight))
        graded = {self.names[param]: anchor for param, anchor in self._of(fragment) if anchor.grad is not None}
        if self.rule.delay:
            self._outgoing = {name: anchor.grad.clone() for name, anchor in graded.items() if anchor.grad is not None}
        for anchor in graded.values():
            outer._gradient_arrived(anchor)

    def _round(self) -> Generator[Handle, Tensor, None]:
        if self._joining:
            yield from self._vote()
            if not self._actives:
                return
        self._launch()
        if self.comm.constructs_in_turn:
            yield self._traffic.start(Barrier(), "outer step")  # whose exchange may wait for nobody's local step
        assert self._departed is not None
        outer, fragment = self.outers[self._departed], self._departed
        outer.step()
        engine = outer._engine
        if engine is not None and engine.void:
            raise self._not_finite(engine.infinite)
        outer.zero_grad()
        self._arrive(fragment)

    @torch.no_grad()
    def _arrive(self, fragment: int) -> None:
        """Weights follow their anchors."""
        for param, anchor in self._of(fragment):
            if self._may_differ(param):
                param.copy_(anchor if self.rule.alpha == 0 else torch.lerp(anchor, param.to(anchor), self.rule.alpha))
                if self.rule.alpha == 0:
                    self._apart.discard(param)
        self._departed, self._outgoing = None, {}
        self._since = 0

    def _may_differ(self, param: Tensor) -> bool:
        """Whether ranks have trained it since it was the same on all, or will."""
        return param.requires_grad or param in self._apart

    def _look(self) -> None:
        self._finite = all(is_finite(param.detach()) for param in self.names)

    def _of(self, fragment: int) -> list[tuple[Tensor, nn.Parameter]]:
        """The parameters of a fragment and their anchors."""
        names = self.outers[fragment]._parameter_names
        return [(param, anchor) for param, anchor in self._anchors.items() if anchor in names]

    def _abandon(self) -> None:
        super()._abandon()
        for outer in self.outers:
            outer.zero_grad()
        self._departed, self._outgoing = None, {}

    @property
    def _has_moved(self) -> bool:
        return self._moved > self._local_step - self.rule.every

    def _take_new_parameters(self) -> None:
        before = set(self.names)
        super()._take_new_parameters()
        for param, name in self.names.items():
            if param not in before:
                anchor = self._anchors[param] = _anchor(param)
                self.outers[-1]._given_names[anchor] = name
                self.outers[-1].add_param_group({"params": [anchor]})

    # -- what persists -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _start(self, bucket: Bucket, ctx: Weights) -> None:
        super()._start(bucket, ctx)
        held = self._shared.get("anchor", {})
        for segment in bucket.segments if self._local_step >= 0 else ():
            if segment.param not in self._anchored:
                self._anchored.add(segment.param)
                self._anchors[segment.param].copy_(held.pop(segment.name, segment.param))

    @property
    def _under_way(self) -> bool:
        return self._departed is not None

    def _repeat(self) -> None:
        self._depart(self._turn(self._local_step + self.rule.delay), again=True)

    def _state(self) -> dict[str, Any]:
        state = super()._state()
        if self._anchored:
            anchors = {self.names[param]: self._anchors[param].detach().clone() for param in self._anchored}
            state["shared"]["anchor"] = state["shared"].get("anchor", {}) | anchors
        if self._outgoing:
            state["memory"]["outgoing"] = {name: grad.clone() for name, grad in self._outgoing.items()}
        return state

    def _save(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        super()._save(optimizer, state_dict)
        state_dict[KEY]["outers"] = [outer.state_dict() for outer in self.outers]

    def _load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        rest = super()._load(optimizer, state_dict)
        if rest is not None:
            states = state_dict[KEY]["outers"]
            if len(states) != len(self.outers):
                raise ConfigError(f"the state is of {len(states)} fragments, and there are {len(self.outers)}")
            # a single rank saves no memory, and what was held back since must not stay
            nothing = {"rank": self.comm.rank, "world_size": self.comm.size, "step": 0, "order": [], "memory": {}}
            for outer, state in zip(self.outers, states, strict=True):
                outer.load_state_dict({STATE_KEY: nothing} | state)
        return rest

    def _restore(self, state: dict[str, Any]) -> None:
        if self._departed is not None:
            self.outers[self._departed].synchronize()  # what was sent runs out, on all ranks
        super()._restore(state)
        self._anchored = set()
        self._outgoing = self._kept.pop("outgoing", {})

    def rejoin(self, comm: Comm | None = None) -> None:
        self._departed, self._outgoing = None, {}
        super().rejoin(comm)
        for outer in self.outers:  # in the order in which a rank that is new to the world joins it
            outer.rejoin(self.comm)


def _anchor(param: Tensor) -> nn.Parameter:
    """What an outer optimizer steps in place of a parameter."""
    return nn.Parameter(param.detach().clone().to(at_least_float32(param.dtype)), requires_grad=param.requires_grad)


def _split(params: list[Tensor], parts: int) -> list[list[Tensor]]:
    """Runs of parameters with about as many elements each. Raises ConfigError if there are too few parameters."""
    if parts > len(params):
        raise ConfigError(f"{len(params)} parameters cannot be split into {parts} fragments")
    total, seen = sum(param.numel() for param in params), 0
    runs: list[list[Tensor]] = [[] for _ in range(parts)]
    place = 0
    for left, param in zip(range(len(params), 0, -1), params, strict=True):
        # on to the next one where the middle of this parameter lies beyond, or as many are left as runs without any
        is_due = seen + param.numel() / 2 > total * (place + 1) / parts or left == parts - place - 1
        if runs[place] and is_due and place < parts - 1:
            place += 1
        runs[place].append(param)
        seen += param.numel()
    return runs
