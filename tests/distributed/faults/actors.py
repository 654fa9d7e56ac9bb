"""Simulated ranks of one process, each stepped by itself, as separate processes would be."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import dgcopt
from dgcopt import Comm
from dgcopt.gradients.synchronised import synchronised
from tests.distributed.faults.training import digest
from tests.support.library import SETTINGS

SIZES = (12, 30, 20, 5)
BUCKETS = {"bucket_mb": 0.0016, "first_bucket_mb": 0.0008}
PLAIN = functools.partial(torch.optim.SGD, lr=0.05)
M = 0.9
MOMENTUM = functools.partial(torch.optim.SGD, lr=0.05, momentum=M)
TRIES = 2
"""How often a rank may try one step again."""

Memory = dict[str, Tensor]
"""What is kept of a parameter, by kind."""

AVERAGING: list[Callable[[], Any]] = [
    lambda: dgcopt.averaging.LocalSGD(2),
    lambda: dgcopt.averaging.SlowMo(2),
    lambda: dgcopt.averaging.DiLoCo(2),
    lambda: dgcopt.averaging.SPARTA(0.1),
    lambda: dgcopt.averaging.SGP(),
    lambda: dgcopt.averaging.Decentralized(),
]
"""Averages of weights, made anew for each rank."""

SUBJECTS = len(SETTINGS) + len(AVERAGING)


def subject_name(subject: int) -> str:
    if subject < len(SETTINGS):
        return repr(SETTINGS[subject][0])
    return type(AVERAGING[subject - len(SETTINGS)]()).__name__


class Actor:
    """One rank: a model, its optimizer, and the two calls of a training loop."""

    def __init__(self, comm: Comm, subject: int, **settings: Any) -> None:
        self.comm, self.subject = comm, subject
        torch.manual_seed(1)
        pairs = itertools.pairwise(SIZES)
        self.model = nn.Sequential(*(layer for n, m in pairs for layer in (nn.Linear(n, m), nn.Tanh())))
        self.averages = subject >= len(SETTINGS)
        if not self.averages:
            compressor, given = SETTINGS[subject]
            default = PLAIN if isinstance(compressor, dgcopt.Signum | dgcopt.DeMo) else MOMENTUM
            self.optimizer: Any = given.get("optimizer", default)(self.model.parameters())
            settings = {**BUCKETS, "compression": copy.deepcopy(compressor), **settings}
            dgcopt.DistributedOptimizer(self.optimizer, self.model.named_parameters(), comm=comm, **settings)
        else:
            self.optimizer = MOMENTUM(self.model.parameters())
            self.optimizer.register_step_post_hook(self._local_step_ended)
            AVERAGING[subject - len(SETTINGS)]().attach(self.optimizer, self.model.named_parameters(), comm)

    def backward(self, step: int) -> None:
        self.optimizer.zero_grad()
        torch.manual_seed(1000 * step + self.comm.rank)
        inputs, targets = torch.randn(6, SIZES[0]), torch.randn(6, SIZES[-1])
        nn.functional.mse_loss(self.model(inputs), targets).backward()

    def step(self, step: int) -> None:
        torch.manual_seed(1000 * step + self.comm.rank + 500)
        self.optimizer.step()

    def _local_step_ended(self, *_: Any) -> None:
        """The weights before they are averaged."""
        self.stepped = self.weights()

    def memory(self) -> dict[str, Memory]:
        """What dgcopt keeps, by parameter name; nothing where weights are averaged."""
        found: dict[str, Memory] = {}
        if not self.averages:
            for kind, by_name in self.optimizer.state_dict()["dgcopt"]["memory"].items():
                for name, tensor in by_name.items():
                    found.setdefault(name, {})[kind] = tensor
        return found

    def held(self) -> dict[str, Any]:
        """Hashes of each parameter's memory and of all else that dgcopt keeps; parameters with a gradient."""
        others = {} if self.averages else {**self.optimizer.state_dict()["dgcopt"], "memory": {}}
        graded = [name for name, p in self.model.named_parameters() if p.grad is not None and p.grad.any()]
        return {
            "memory": {name: digest(kinds) for name, kinds in self.memory().items()},
            "others": digest(others),
            "graded": graded,
        }

    def weights(self) -> str:
        return digest(self.model.state_dict())

    def state(self) -> tuple[str, str, str]:
        """Hashes of the weights, of the optimizer's own state, and of what dgcopt adds to it."""
        state = self.optimizer.state_dict()
        ours = {key: state.pop(key) for key in ("dgcopt", "averaging") if key in state}
        if self.averages:  # it holds a copy of the weights for ranks that come later
            ours["averaging"]["dgcopt"]["memory"].pop("weights", None)
        return self.weights(), digest(state), digest(ours)


class Absorbed:
    """Where ranks stand if their memory has taken the gradients of a step in, and the step was aborted then.

    That is what a rank's memory holds when the wire refuses a message of the step, or refuses it again when the step is
    tried again, with gradients that are zero by then. It is believed only of parameters whose gradients it conserves.

    Args:
        trained: makes ranks that have made all steps before this one.
        step: the number of the step.
    """

    def __init__(self, trained: Callable[[], list[Actor]], step: int) -> None:
        self._trained, self._step = trained, step
        whole, self._before = trained(), [actor.held() for actor in trained()]
        for actor in whole:
            actor.backward(step)
        for actor in whole:
            actor.optimizer.synchronize()
        left = [actor.memory() for actor in whole]
        applied = {name: param.grad for name, param in whole[0].model.named_parameters()}
        self._memory: list[list[dict[str, Memory]]] = [[{} for _ in whole] for _ in range(TRIES)]
        self._hashes: list[dict[str, set[str]]] = [{} for _ in whole]
        for first in itertools.count():
            actors = trained()
            if not self._refused(actors, first):
                break
            aborted = [actor.memory() for actor in actors]
            for tried in self._memory:
                memory = [actor.memory() for actor in actors]
                for name, grad in applied.items():
                    if _leaves(name, grad, aborted, left) and _keeps(name, aborted, memory):
                        for rank, held in enumerate(memory):
                            self._hashes[rank].setdefault(name, set()).add(digest(held[name]))
                            tried[rank].setdefault(name, held[name])
                for actor in actors:
                    with contextlib.suppress(dgcopt.DGCError):
                        actor.step(step)

    def _refused(self, actors: list[Actor], first: int) -> bool:
        """Make a step on a wire that refuses messages of exchanges from the `first` on; returns whether it has."""
        number = itertools.count()

        def refusing(wait: Callable[..., Tensor], handle: Any, *more: Any) -> Tensor:
            if " round " in handle.collective.label and next(number) >= first:
                raise dgcopt.CommError("rank 0: refused")
            return wait(handle, *more)

        for actor in actors:
            actor.comm.wait = functools.partial(refusing, actor.comm.wait)  # type: ignore[method-assign]
            actor.backward(self._step)
            synchronised(actor.optimizer).engine.gradients.wait_for_vote()
        for actor in actors:
            with contextlib.suppress(dgcopt.DGCError):
                actor.step(self._step)
        return next(number) > first

    def has(self, rank: int, held: dict[str, Any]) -> bool:
        """True if a rank's memory is as before the step, but for gradients that it has taken in and that are zero."""
        before, absorbed = self._before[rank], self._hashes[rank]
        names = {name for name, now in held["memory"].items() if now != before["memory"].get(name)}
        return (
            bool(names)
            and held["others"] == before["others"]
            and held["memory"].keys() == before["memory"].keys()
            and all(held["memory"][name] in absorbed.get(name, ()) for name in names)
            and names.isdisjoint(held["graded"])
        )

    def gone_on(self, tries: Sequence[int]) -> list[tuple[str, str, str]]:
        """Return all ranks' states after the step, if each was aborted on a rank so many times before."""
        actors = self._trained()
        taken = [self._memory[count - 1][rank] if count else {} for rank, count in enumerate(tries)]
        for actor, memory in zip(actors, taken, strict=True):
            state = actor.optimizer.state_dict()
            for name, kinds in memory.items():
                for kind, tensor in kinds.items():
                    state["dgcopt"]["memory"][kind][name] = tensor
            actor.optimizer.load_state_dict(state)
        for actor, memory in zip(actors, taken, strict=True):
            actor.backward(self._step)
            for name in memory:
                actor.model.get_parameter(name).grad.zero_()
        for actor in actors:
            actor.step(self._step)
        return [actor.state() for actor in actors]


def _leaves(name: str, applied: Tensor, held: list[dict[str, Memory]], left: list[dict[str, Memory]]) -> bool:
    """True if what all ranks hold unsent is what a step has `left` them, and what it has `applied` on each."""
    missing = -len(held) * applied.double()
    for here, there in zip(held, left, strict=True):
        if name not in here or here[name].keys() != there.get(name, {}).keys():
            return False
        missing += sum(here[name][k].double() - there[name][k].double() for k in here[name] if k.startswith("residual"))
    return bool(missing.norm() <= 1e-5 * len(held) * applied.double().norm())


def _keeps(name: str, before: list[dict[str, Memory]], after: list[dict[str, Memory]]) -> bool:
    """True if steps without a gradient, of which nothing was sent, have kept all that there was.

    Momentum becomes gradient in later steps, m + m^2 + ... = m / (1 - m) times.
    """

    for here, there in zip(before, after, strict=True):
        apart, rounding = torch.zeros(()), torch.zeros(())
        for kind, old in here[name].items():
            weight, new = M / (1 - M) if kind == "momentum" else 1.0, there[name][kind].double()
            apart = apart + weight * (new - old.double())
            rounding = rounding + weight * max(1e-5, torch.finfo(old.dtype).eps) * old.double().abs()
        if (apart.abs() > rounding + 1e-6).any():
            return False
    return True


def calls_of(actors: list[Actor], step: int) -> list[tuple[Actor, Callable[[], None]]]:
    """The calls of one step in the order in which simulated ranks make them."""
    calls = [(actor, functools.partial(actor.backward, step)) for actor in actors]
    return calls + [(actor, functools.partial(actor.step, step)) for actor in actors]


def one_step(actors: list[Actor], step: int) -> None:
    for _, call in calls_of(actors, step):
        call()
