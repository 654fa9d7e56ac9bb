"""DiLoCo: an outer optimizer steps on the averaged pseudo-gradient of H local steps, sent by any compressor."""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Optimizer

from ..collectives import on_cpu
from ..comm import Comm
from ..compressors import ChunkedTopK, Compressor, NoCompression, accept
from ..compressors.adam.base import FrozenAdam
from ..compressors.sparse.schedule import Warmup
from ..errors import ConfigError
from ..errors.checks import check_group_settings, check_positive, check_whole, is_number
from ..exchange.commit import NotFinite
from ..exchange.runner import Job
from ..exchange.step import Aborted
from ..exchange.vote import Verdict
from ..flat.buckets import Bucket
from ..flat.local_shard import as_stepped
from ..flat.memory import at_least_float32
from ..flat.optimizer_state import STATE_KEY, kept_by
from ..flat.store import NamedTensors
from ..gradients.optimizer import DistributedOptimizer
from ..gradients.synchronised import steps_of, synchronised
from .base import Averaging
from .rule import refuse_with_losses
from .sync import Round, RoundStep, Sync

__all__ = ["DiLoCo", "Outer", "OuterSync", "SparseLoCo"]

log = logging.getLogger("dgcopt")

Outer: TypeAlias = Callable[[Iterable[Tensor]], Optimizer]
"""A factory of optimizers: a class of torch.optim with its settings, by functools.partial."""


class DiLoCo(Averaging):
    """An outer optimizer steps every H local steps, on the mean of the ranks' pseudo-gradients.

        after step t, H | t:  g = mean_i (a - x_i), compressed;  a <- outer(a, g);  x_i <- a + alpha (x_i - a)

    The anchor a is the common state of all ranks since the last outer step. With H = 1, outer SGD(lr=1) without
    momentum and no compression this is dense data-parallel SGD; the inner optimizer's state stays local.

    A `DistributedOptimizer` over the anchors makes the outer step. So any compressor works, with its own momentum
    correction, error feedback and warm-up, counted in outer steps. Loading a checkpoint of another world size preserves
    the mean of the residuals, like that of the weights.

    With `quorum` an outer step waits for no straggler (`dgcopt.init(survive=True)`):

        a round opens when the first rank has made H local steps since the last one; others come after the local step
        that they are in, whatever their number; it closes once all have come, or `grace` seconds after `quorum` have
        in a closed round:  g = sum_i n_i (a - x_i) / sum_i n_i,  n_i samples of rank i since its last round
        a late rank takes part in no round; it joins after the next one:  x_i <- a' + (x_i - a),  a <- a'

    with a' the anchor of the others: its progress since the anchor a counts in the round after that. Samples are those
    given to `optimizer.averaging.add_samples()`, or else local steps. `optimizer.averaging.step`, equal on all ranks of
    a round, is the step of the schedule: loops end by it, and not by a count of their own.

    Error feedback alone takes the weights back to the anchor, so that local progress e_i which was not sent is gone
    from where the next gradients are taken. With unsent="local" it stays there: x_i <- a - e_i after the outer step.

    Args:
        every: H, local steps between two outer steps of a parameter. Larger sends less; beyond some hundreds the loss
            suffers.
        outer: factory of the outer optimizer: any torch.optim class except LBFGS, in a functools.partial with its
            settings. None is SGD(lr=0.7, momentum=0.9, nesterov=True). Use a smaller lr if H is small.
        compression: compressor of outer gradients; None sends them dense.
        fragments: Streaming DiLoCo: number of model parts of about equal size that take turns, one every H / fragments
            steps, so that no step sends the whole model. Must divide `every`.
        delay: local steps during which a fragment's exchange may run. Its outer gradient is that old when it is
            applied, and the progress of those steps is lost unless alpha keeps part of it. Less than
            `every / fragments`. With a sparse compressor a warning: the residual delays progress too.
        alpha: fraction of its own weights that a rank keeps, in [0, 1]: 0 makes all ranks equal, 1 only moves the
            anchor.
        warmup_steps: number of first steps of dense data-parallel training.
        unsent: "apart" to keep progress that was not sent in the compressor's residual only; "local" to keep it in
            this rank's weights too, which then differ from other ranks' by the residuals: `averaging.residual_norm()`
            is the distance from the anchor, and `averaging.averaged()` evaluates the mean. For rules whose residual is
            all that they do not send, such as TopK; needs alpha = 0.
        quorum: number of ranks that an outer step waits for; of half of the ranks it waits in any case, and of all if
            fewer are left. None waits for all. Lower waits less and uses less of stragglers' progress.
        grace: seconds that `quorum` ranks wait for the others. Longer than the slowest rank's local step plus 0.2 s, it
            loses no round of a rank that is merely slow.

    Costs, every H steps, the cost of `compression` for one gradient. Memory: the anchor (float32 for half precision),
    the outer optimizer's state, and the outer gradient during its exchange. After an outer step all ranks hold the same
    bits if alpha is 0, there is one fragment, and nothing unsent is kept in the weights.

    Raises ConfigError for settings out of range, and for a compressor that needs every step's gradient.
    Sources: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", arXiv:2311.08105,
    Algorithm 1; Douillard et al., "Streaming DiLoCo with overlapping communication", arXiv:2501.18512; quorum,
    grace and weights by tokens after "Decoupled DiLoCo", arXiv:2604.21428, where a central syncer merges.
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
        unsent: Literal["apart", "local"] = "apart",
        quorum: int | None = None,
        grace: float = 2.0,
    ) -> None:
        self.every = check_whole(every, "every", 1)
        self.outer = partial(SGD, lr=0.7, momentum=0.9, nesterov=True) if outer is None else outer
        self.compression = None if compression is None else accept(compression)
        self.fragments = check_whole(fragments, "fragments", 1)
        self.delay = check_whole(delay, "delay", 0)
        self.warmup_steps = check_whole(warmup_steps, "warmup_steps", 0)
        self.unsent = unsent
        self.quorum = None if quorum is None else check_whole(quorum, "quorum", 1)
        self.grace = check_positive(grace, "grace")
        if every % fragments:
            raise ConfigError(f"every must be a multiple of fragments: every is {every}, fragments {fragments}")
        if delay >= self.interval:
            raise ConfigError(
                f"delay must be less than every / fragments = {self.interval}, or two fragments would be in flight; it "
                f"is {delay}"
            )
        parts = [*self.compression.parts()] if self.compression is not None else []
        sparse = [part for part in parts if getattr(part, "ratio", 1.0) < 1]
        if delay and sparse:
            log.warning(
                "dgcopt: DiLoCo(delay=%d) delays outer gradients, and the residual of %r delays most of them further: "
                "compare the loss with delay=0, or raise the ratio",
                *(delay, sparse[0]),
            )
        if not is_number(alpha) or not 0 <= alpha <= 1:
            raise ConfigError(f"alpha must be a number from 0 to 1, not {alpha!r}")
        self.alpha = float(alpha)
        if unsent not in ("apart", "local"):
            raise ConfigError(f'unsent must be "apart" or "local", not {unsent!r}')
        if unsent == "local" and (alpha or self.compression is None or self.compression.sends == "update"):
            raise ConfigError(
                'unsent="local" needs a compressor of gradients, such as compression=TopK(0.01), and alpha=0: the '
                f"compressor is {self.compression!r}, alpha {alpha}"
            )
        if not callable(self.outer):
            raise ConfigError(f"outer must be a factory of optimizers, such as partial(SGD, lr=0.7), not {outer!r}")
        for part in parts:
            if isinstance(part, FrozenAdam):
                raise ConfigError(
                    f"{type(part).__name__} learns Adam's second moments from every step's gradient, but outer "
                    f"gradients come every {every} steps. Choose another compressor, such as DGC or PowerSGD."
                )

    by_bucket = False

    @property
    def interval(self) -> int:
        """Local steps between the turns of two fragments."""
        return self.every // self.fragments

    def due(self, step: int) -> bool:
        return step % self.interval == 0

    def identical(self, step: int) -> bool:
        return self.due(step) and self.fragments == 1 and self.alpha == 0 and self.unsent == "apart"

    def check_survives(self) -> None:
        refuse_with_losses(self, delay=0, warmup_steps=0)
        if self.quorum is not None:
            refuse_with_losses(self, fragments=1)

    def check(self, comm: Comm, names: Sequence[str]) -> None:
        if self.quorum is not None and not comm.survives and comm.size > 1:
            raise ConfigError(
                f"{type(self).__name__}(quorum={self.quorum}) closes rounds without late ranks and needs "
                f"dgcopt.init(survive=True)"
            )

    def set_steps_per_epoch(self, steps: int) -> None:
        if self.compression is not None:
            self.compression.set_steps_per_epoch(self.rounds_per_epoch(steps))

    def rounds_per_epoch(self, steps: int) -> int:
        """Return the number of outer steps in an epoch of `steps` local steps; at least 1."""
        return max(1, steps // self.every)

    def sync(self, round: Round) -> Sync:
        return OuterSync(self, round)


class SparseLoCo(DiLoCo):
    """DiLoCo that sends the largest coordinates of each chunk in 2 bits, with error feedback.

    Decaying error feedback replaces the outer momentum. An outer step subtracts its unsent part from the weights. At
    the start that is nearly all progress, so the first outer steps send more.

    Args:
        every: H, as for DiLoCo.
        ratio: fraction of each chunk's coordinates to send.
        chunk: coordinates per chunk.
        decay: factor of the residual after each round.
        lr: learning rate of the outer SGD.
        warmup_steps: number of first steps of dense data-parallel training.
        warmup: ratios of the first outer steps; add more if the loss rises after them. The paper has none.

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


class OuterSync(Sync):
    """A round of DiLoCo on one rank: the step of a fragment's outer optimizer.

    Each fragment has a DistributedOptimizer of its anchors, whose own engine exchanges and votes.

    Attributes:
        anchors: anchor of each parameter.
        sending: index of the fragment in flight; None if there is none.
    """

    def __init__(self, rule: DiLoCo, round: Round) -> None:
        super().__init__(round)
        self.rule = rule
        self.anchors: dict[Tensor, nn.Parameter] = {}
        self.sending: int | None = None
        self._compression = NoCompression() if rule.compression is None else copy.deepcopy(rule.compression)
        self._compression.see_parameters(round.names)  # all of them; a fragment has only some
        self._fragments: list[list[Tensor]] = _split(list(round.names), rule.fragments)
        self._anchored: set[Tensor] = set()  # parameters whose anchor is the start of the local steps
        self._outgoing: dict[str, Tensor] = {}  # the outer gradient in flight, for a checkpoint during `delay`
        for params in self._fragments:
            anchors = {param: _anchor(param) for param in params}
            try:
                outer = rule.outer(list(anchors.values()))
            except (TypeError, ValueError) as error:
                raise ConfigError(f"outer: {error}") from error
            if not isinstance(outer, Optimizer) or isinstance(outer, LBFGS):
                raise ConfigError(f"outer must return an optimizer that steps without a closure, not {outer!r}")
            check_group_settings(outer.param_groups, "outer")
            self.anchors |= anchors
            self.outers.append(outer)

    def join(self) -> None:
        comm = self.round.comm
        for outer, params in zip(self.outers, self._fragments, strict=True):
            if synchronised(outer) is not None:  # in the order in which a new rank of the world joins it
                outer.rejoin(comm)
            else:
                named = [(self.round.names[param], self.anchors[param]) for param in params]
                DistributedOptimizer(outer, named, self._compression, comm=comm)
            steps_of(outer).leave_lost_ranks_to_caller()
            if (engine := steps_of(outer).engine) is not None:
                engine.gradients.inspect_sums()  # outer steps are rare, and NaN would stay in the anchors

    def set_steps_per_epoch(self, steps: int) -> None:
        super().set_steps_per_epoch(steps)
        for outer in self.outers:
            outer.compressor.set_steps_per_epoch(self.rule.rounds_per_epoch(steps))

    def add_parameters(self, params: Iterable[Tensor]) -> None:
        for param in params:
            anchor = self.anchors[param] = _anchor(param)
            self._fragments[-1].append(param)
            self.outers[-1].add_param_group({"params": [anchor]}, names=[self.round.names[param]])

    @torch.no_grad()
    def start(self, bucket: Bucket) -> None:
        loaded = self.round.replica.store.shared.get("anchor", {})
        for segment in bucket.segments:
            if segment.param not in self._anchored:
                self._anchored.add(segment.param)
                self.anchors[segment.param].copy_(loaded.pop(segment.name, segment.param))

    # -- an outer step -----------------------------------------------------------------------------------------------

    def launch(self) -> None:
        self._send(self.turn(self.round.local_step + self.rule.delay))

    def turn(self, step: int) -> int:
        """Return the fragment whose turn it is at a local step."""
        return (step // self.rule.interval - 1) % self.rule.fragments

    def members(self, fragment: int) -> list[tuple[Tensor, nn.Parameter]]:
        """Return the parameters of a fragment and their anchors."""
        return [(param, self.anchors[param]) for param in self._fragments[fragment]]

    def _starts(self, fragment: int) -> Iterator[tuple[Tensor, nn.Parameter, Tensor]]:
        """Yield the parameters of a fragment, their anchors, and the weights at which local steps start from these."""
        engine = steps_of(self.outers[fragment]).engine
        residual = engine.store.residual() if engine is not None and self.rule.unsent == "local" else {}
        for param, anchor in self.members(fragment):
            unsent = residual.get(self.round.names[param])
            yield param, anchor, anchor if unsent is None else anchor - unsent

    @torch.no_grad()
    def _send(self, fragment: int, again: bool = False) -> None:
        """Give the outer optimizer its pseudo-gradient, and launch the exchange.

        With `again`, the pseudo-gradient is the one that was in flight when state was saved.
        """
        self.sending = fragment
        names, weight = self.round.names, self.round.replica.weight
        outer, saved = self.outers[fragment], self._outgoing
        graded = {}
        for param, anchor, start in self._starts(fragment):
            anchor.requires_grad_(names[param] in saved if again else self._may_differ(param))
            if anchor.requires_grad:
                # relative to the rounded start that was written to the weights; rounding must not count as a change
                change = start.to(param.dtype).to(anchor.dtype) - param
                anchor.grad = saved[names[param]] if again else change.mul_(weight)
                graded[names[param]] = anchor
        if self.rule.delay:
            self._outgoing = {name: anchor.grad.clone() for name, anchor in graded.items() if anchor.grad is not None}
        with on_cpu():
            for anchor in graded.values():
                steps_of(outer).gradient_arrived(anchor)

    def run(self) -> Job:
        return OuterStep(self, self.round).take()

    def send_due(self) -> Optimizer:
        """Launch the outer gradient whose turn it is, unless it is in flight; return its outer optimizer."""
        if self.sending is None:
            self._send(self.turn(self.round.local_step))
        assert self.sending is not None
        return self.outers[self.sending]

    @torch.no_grad()
    def write_back(self) -> None:
        """Write the anchors of the fragment in flight to its weights."""
        assert self.sending is not None
        rule, followed = self.rule, list[Tensor]()
        for param, anchor, start in self._starts(self.sending):
            if self._may_differ(param):
                param.copy_(start if rule.alpha == 0 else torch.lerp(anchor, param.to(anchor), rule.alpha))
                followed.append(param)
        self.sending, self._outgoing = None, {}
        self.round.replica.mark_synced(followed if rule.alpha == 0 and rule.unsent == "apart" else [])

    def _may_differ(self, param: Tensor) -> bool:
        """Return True if ranks train the parameter, or have trained it since it was equal on all."""
        return param.requires_grad or param in self.round.replica.unsynced

    def abort(self) -> str:
        self.round.replica.rollback()
        for outer in self.outers:
            outer.zero_grad()
        self.sending, self._outgoing = None, {}
        return ""

    # -- persistence -------------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> bool:
        return self.sending is not None

    def relaunch(self) -> None:
        rule, step, names = self.rule, self.round.local_step, self.round.names
        turns = [self.turn(due) for due in range(step + 1, step + rule.delay + 1) if rule.due(due)]
        is_of_turn = not self._outgoing or any(names[p] in self._outgoing for t in turns for p in self._fragments[t])
        if turns and is_of_turn:
            self._send(turns[0], again=True)
        else:  # saved with another `every` or `delay`: the next outer step includes its progress
            self._outgoing = {}

    def progress(self) -> dict[Tensor, Tensor]:
        # relative to the rounded start, as an outer gradient
        return {param: param.detach() - start.detach().to(param.dtype) for param, start in self._all_starts()}

    def move_progress(self, progress: dict[Tensor, Tensor]) -> None:
        for param, start in self._all_starts():
            param.copy_(start + progress[param])

    def _all_starts(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield all parameters and the weights at which their local steps start."""
        for fragment in range(self.rule.fragments):
            yield from ((param, start) for param, _, start in self._starts(fragment))

    def cancel(self) -> None:
        if self.sending is not None:
            self.outers[self.sending].synchronize()

    def save(self, entry: dict[str, Any], state: dict[str, Any]) -> None:
        names = self.round.names
        if self._anchored:
            anchors = {names[p]: a.detach().clone() for p, a in self.anchors.items() if p in self._anchored}
            state["shared"]["anchor"] = state["shared"].get("anchor", {}) | anchors
        if self._outgoing:
            state["memory"]["outgoing"] = {name: grad.clone() for name, grad in self._outgoing.items()}
        entry["outers"] = [outer.state_dict() for outer in self.outers]
        entry["fragments"] = self._names_of_fragments()

    def _names_of_fragments(self) -> list[list[str]]:
        return [[self.round.names[param] for param in params] for params in self._fragments]

    def load(self, entry: dict[str, Any], state: dict[str, Any]) -> None:
        self._anchored = set()
        self._outgoing = {name: grad.clone() for name, grad in state["memory"].get("outgoing", {}).items()}
        self.round.replica.store.drop("outgoing")
        if "outers" not in entry:
            raise ConfigError(
                "the state has no outer optimizers, so another algorithm saved it. Resume with that one, or start from "
                "the model's weights alone: load no state of the optimizer, or delete its entry 'averaging'."
            )
        if len(entry["outers"]) != len(self.outers):
            raise ConfigError(
                f"the state has {len(entry['outers'])} fragments, this DiLoCo {len(self.outers)}. Set the same number."
            )
        # a single rank saves no memory; residuals since then must not stay
        nothing = kept_by(self.round.comm.rank, self.round.comm.size)
        # resharding preserves sums, but outer gradients are means
        scale = self.round.comm.size / abs(state["saved_by"])
        for outer, kept in zip(self.outers, self._in_own_groups(entry), strict=True):
            held = kept.get(STATE_KEY, nothing)
            memory = {kind: {n: flat * scale for n, flat in of.items()} for kind, of in held["memory"].items()}
            outer.load_state_dict({**kept, STATE_KEY: {**held, "memory": memory}})

    def _in_own_groups(self, entry: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield each outer optimizer's state in its own groups; those saved depend on when parameters were added."""
        if "fragments" not in entry:  # `dgcopt.sharded.load` has read the state into these groups
            yield from entry["outers"]
            return
        fragments = self._names_of_fragments()
        if fragments != entry["fragments"]:
            log.warning(
                "dgcopt: rank %d: parameters were added at another time than in the run that saved this state, so some "
                "are in other fragments now and take their next outer step with those",
                self.round.comm.rank,
            )
        group_of, state_of = dict[str, Any](), dict[str, Any]()
        parts = [kept[STATE_KEY] for kept in entry["outers"] if STATE_KEY in kept]
        for kept, names in zip(entry["outers"], entry["fragments"], strict=True):
            numbered = [(number, group) for group in kept["param_groups"] for number in group["params"]]
            for name, (number, group) in zip(names, numbered, strict=True):
                group_of[name], state_of[name] = group, kept["state"].get(number)
        for outer, names, kept in zip(self.outers, fragments, entry["outers"], strict=True):
            groups, numbers = list[dict[str, Any]](), itertools.count()
            for group in outer.param_groups:
                own = [next(numbers) for _ in group["params"]]
                saved = [group_of[names[number]] for number in own if names[number] in group_of]
                groups.append({**(saved[0] if saved else group), "params": own})
            state = {number: state_of[name] for number, name in enumerate(names) if state_of.get(name)}
            regrouped = {**kept, "state": state, "param_groups": groups}
            if STATE_KEY in kept:
                regrouped[STATE_KEY] = {
                    **kept[STATE_KEY],
                    "order": [name for part in parts for name in part["order"] if name in names],
                    "memory": _of(names, [part["memory"] for part in parts]),
                    "shared": _of(names, [part["shared"] for part in parts]),
                    "made_of": {n: made for part in parts for n, made in part["made_of"].items() if n in names},
                }
            yield regrouped


class OuterStep(RoundStep):
    """One round of DiLoCo. The outer optimizer's own engine votes on its gradient, and commits or aborts memory.

    Ranks vote on the round itself only to learn which of them have data.
    """

    changes = "anchors and weights"

    def __init__(self, sync: OuterSync, round: Round) -> None:
        super().__init__(round)
        self.sync = sync

    @property
    def votes(self) -> bool:
        return self.round.joining

    def has_progress(self) -> bool:
        return self.round.last_own_step > self.round.local_step - self.sync.rule.every

    def complete(self, verdict: Verdict | None = None) -> Job:
        outer = self.sync.send_due()
        engine = steps_of(outer).engine
        if engine is not None:
            engine.expect_step()  # even if the whole fragment is frozen
        yield from self.round.runner.together("outer step")
        outer.step()
        self.marker.begin(self.changes)  # anchors have their new values
        if engine is not None and engine.gradients.void:
            ranks = engine.gradients.infinite
            self.abort(Aborted(ranks, [] if ranks else [NotFinite("an outer gradient", [])]))
            return
        outer.zero_grad()
        self.sync.write_back()
        self.marker.end()

    def skip(self, arrived: Sequence[NotFinite]) -> None:
        log.warning(
            "dgcopt: rank %s: the outer step after local step %d is skipped, on all ranks; the next one includes its "
            "progress",
            *(self.comm.rank, self.round.local_step),
        )
        self.sync.abort()


def _of(names: Sequence[str], parts: Iterable[NamedTensors]) -> NamedTensors:
    """Return the tensors of these parameters in all parts."""
    found: NamedTensors = {}
    for part in parts:
        for kind, by_name in part.items():
            found.setdefault(kind, {}).update({name: by_name[name] for name in names if name in by_name})
    return found


def _anchor(param: Tensor) -> nn.Parameter:
    """Return a copy of a parameter, for the outer optimizer to step."""
    return nn.Parameter(param.detach().clone().to(at_least_float32(param.dtype)), requires_grad=param.requires_grad)


def _split(params: list[Tensor], parts: int) -> list[list[Tensor]]:
    """Split parameters into runs of similar size. Raises ConfigError if there are too few parameters."""
    if parts > len(params):
        raise ConfigError(f"{len(params)} parameters cannot be split into {parts} fragments")
    # of whole parameters, so that all shards of a replica are split alike
    total, seen = sum(as_stepped(param).numel() for param in params), 0
    runs: list[list[Tensor]] = [[] for _ in range(parts)]
    place = 0
    for left, param in zip(range(len(params), 0, -1), params, strict=True):
        # next run if the middle of this parameter lies beyond it, or if as many parameters as empty runs are left
        is_due = seen + as_stepped(param).numel() / 2 > total * (place + 1) / parts or left == parts - place - 1
        if runs[place] and is_due and place < parts - 1:
            place += 1
        runs[place].append(param)
        seen += as_stepped(param).numel()
    return runs
