"""Checkpoints of sharded parameters: per rank, and through torch.distributed.checkpoint onto other meshes."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import SGD, Adam, AdamW

import dgcopt
from dgcopt import DGC, CheckpointError, Comm, ConfigError
from dgcopt.averaging import Averaging
from dgcopt.collectives import AllReduce
from dgcopt.flat.local_shard import as_dtensor
from dgcopt.flat.memory import is_unsent
from dgcopt.flat.optimizer_state import STATE_KEY
from dgcopt.gradients.synchronised import synchronised

from ..persistence import shared_folder
from ..training import refused
from .setup import NAMES, Wide, loss_of, memory_of, mesh_of, same_memory, sharded, whole, wrap

CASES: dict[str, tuple[dgcopt.Compressor, Callable[..., Any]]] = {
    "DGC and SGD": (DGC(0.2), functools.partial(SGD, lr=0.05, momentum=0.9)),
    "TopK and AdamW": (dgcopt.TopK(0.2), functools.partial(AdamW, lr=0.01)),
    "NoCompression and AdamW": (dgcopt.NoCompression(), functools.partial(AdamW, lr=0.01)),
    "PowerSGD and SGD": (dgcopt.PowerSGD(2, start_step=0), functools.partial(SGD, lr=0.05, momentum=0.9)),
    "OneBitAdam and Adam": (dgcopt.OneBitAdam(2), functools.partial(Adam, lr=0.01)),
}

OUTER = functools.partial(SGD, lr=0.7, momentum=0.9, nesterov=True)

RULES: dict[str, Averaging] = {
    "LocalSGD": dgcopt.LocalSGD(every=2),
    "LocalSGD after a warm-up": dgcopt.LocalSGD(every=3, warmup_steps=2),
    "LocalSGD that overlaps": dgcopt.LocalSGD(every=3, overlap=True),
    "SlowMo": dgcopt.SlowMo(every=2),
    "DiLoCo": dgcopt.DiLoCo(every=2, outer=OUTER, compression=DGC(0.3)),
    "DiLoCo with an outer Adam": dgcopt.DiLoCo(every=2, outer=functools.partial(AdamW, lr=0.01)),
    "DiLoCo in fragments": dgcopt.DiLoCo(every=4, outer=OUTER, fragments=2, delay=1, alpha=0.3),
}
"""Averaging rules; after three steps all have weights apart, memory, or a round in flight."""


class Training:
    """A sharded model and its optimizer on a mesh of so many replicas; `case` is one of `CASES` or `RULES`."""

    def __init__(
        self,
        comm: Comm,
        replicas: int,
        case: str = "DGC and SGD",
        names: tuple[str, str] = NAMES,
        added: Literal["early", "late"] | None = None,
    ) -> None:
        self.comm = comm
        self.case = case
        mesh = mesh_of(comm, replicas, names)
        self.mesh = {name: mesh[own] for name, own in zip(NAMES, names, strict=True)}
        self.model = sharded(self.mesh["shard"], Wide())
        if case in RULES:
            params = [*self.model.parameters()]
            inner = AdamW(params[: -2 if added else None], lr=0.01)
            if added == "early":
                inner.add_param_group({"params": params[-2:]})
            named = self.model.named_parameters()
            self.optimizer: Any = RULES[case].attach(inner, named, mesh=self.mesh["replicate"])
            if added == "late":
                inner.add_param_group({"params": params[-2:]})
        else:
            compressor, make = CASES[case]
            self.optimizer = wrap(self.model, make(self.model.parameters()), self.mesh, compressor)

    def train(self, *steps: int) -> dict[str, Tensor]:
        for step in steps:
            # in step 2 one shard of it shares a bucket with layers that have finished OneBitAdam's warm-up
            self.model[2].weight.requires_grad_(self.case != "OneBitAdam and Adam" or step > 1)
            self.optimizer.zero_grad()
            loss_of(self.model, self.comm, step).backward()
            self.optimizer.step()
        return whole(self.model)

    def state(self) -> dict[str, Any]:
        return {
            "model": get_model_state_dict(self.model),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer),
        }

    def save(self, folder: Path) -> None:
        state = self.state() | {"dgcopt": dgcopt.sharded.state(self.optimizer)}
        dcp.save(state, checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        state = self.state()
        dcp.load(state, checkpoint_id=folder)
        set_model_state_dict(self.model, state["model"])
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"])
        dgcopt.sharded.load(self.optimizer, folder)

    def mean_weights(self) -> dict[str, Tensor]:
        """The mean of the replicas' weights, without an end to the round in flight."""
        averaging = self.optimizer.averaging
        means = {
            name: as_dtensor(averaging.comm.run(AllReduce(param.detach().clone())), param)
            for param, name in averaging.names.items()
        }
        return {name: mean.full_tensor() for name, mean in means.items()}

    def averaged_memory(self) -> dict[str, Tensor]:
        """The memory of averaging as whole parameters: sums, but means where outer gradients are means."""
        averaging = self.optimizer.averaging
        entry = self.optimizer.state_dict()["averaging"]
        params = {name: param for param, name in averaging.names.items()}
        memory: dict[str, Tensor] = {}

        def add(of: str, tensors: dict[str, dict[str, Tensor]], op: str, kinds: Sequence[str] | None = None) -> None:
            for kind in sorted(tensors) if kinds is None else kinds:
                for name in sorted(params):
                    mine = tensors.get(kind, {}).get(name, torch.zeros_like(params[name], requires_grad=False))
                    total = averaging.comm.run(AllReduce(mine.float(), op))  # type: ignore[arg-type]
                    memory[f"{of} {kind} of {name}"] = as_dtensor(total, params[name]).full_tensor()

        slow = ("slow anchor", "slow momentum") if isinstance(averaging.rule, dgcopt.SlowMo) else ()
        add("averaging's", entry[STATE_KEY]["memory"], "sum", slow)
        add("shared", entry[STATE_KEY]["shared"], "average")
        for place, (outer, saved) in enumerate(zip(averaging.outers, entry.get("outers", ()), strict=True)):
            add(f"outer {place}'s", saved[STATE_KEY]["memory"], "average", ("residual", "momentum"))
            names = [*synchronised(outer).names.values()]  # type: ignore[union-attr]
            own: dict[str, dict[str, Tensor]] = {}
            for at, values in saved["state"].items():
                for kind, value in values.items():
                    own.setdefault(kind, {})[names[at]] = value.expand(params[names[at]].shape)
            add(f"outer {place}'s own", own, "average")
        return {name: tensor for name, tensor in memory.items() if tensor.any()}

    def sums(self) -> dict[str, Tensor]:
        """What all replicas keep, added up, as whole parameters."""
        if self.optimizer.__dict__.get("averaging") is not None:
            return self.averaged_memory()
        steps: Any = synchronised(self.optimizer)
        params = {name: param for param, name in steps.names.items()}
        held = memory_of(self.optimizer)
        kinds = ("momentum", "residual")
        zero = {name: torch.zeros_like(param, requires_grad=False) for name, param in params.items()}
        return {
            f"{kind} of {name}": as_dtensor(
                steps.comm.run(AllReduce(held.get(kind, {}).get(name, empty).clone(), "sum")), params[name]
            ).full_tensor()
            for kind in kinds
            for name, empty in zero.items()
        }


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def through_torch(replicas: int, case: str, comm: Comm) -> None:
    """Saved through torch.distributed.checkpoint, training goes on with the same bits on the same mesh."""
    before = Training(comm, replicas, case)
    before.train(0, 1, 2)
    with shared_folder(comm) as folder:
        before.save(folder)
        wanted = before.train(3, 4, 5)
        after = Training(comm, replicas, case)
        after.load(folder)
    assert after.optimizer.state_dict()[STATE_KEY]["step"] == 3
    assert same(after.train(3, 4, 5), wanted)
    held = any(is_unsent(kind) and by_name for kind, by_name in memory_of(after.optimizer).items())
    assert held != case.startswith("NoCompression")


def onto_another_mesh(before: int, after: int, case: str, comm: Comm) -> None:
    """Other numbers of replicas and shards keep the sum of all residuals and momenta, and go on."""
    first = Training(comm, before, case)
    first.train(0, 1, 2)
    sums, weights = first.sums(), whole(first.model)
    assert any(tensor.any() for name, tensor in sums.items() if name.startswith("residual"))
    with shared_folder(comm) as folder:
        first.save(folder)
        second = Training(comm, after, case)
        second.train(0)  # what a load replaces
        second.load(folder)
    assert same(whole(second.model), weights)
    loaded = second.sums()
    for name, total in sums.items():
        torch.testing.assert_close(loaded[name], total, rtol=1e-6, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")
    assert second.optimizer.state_dict()[STATE_KEY]["step"] == 3
    assert not same(second.train(3), weights)
    dgcopt.check_replicas(
        {name: param.to_local() for name, param in second.model.named_parameters()},
        comm=synchronised(second.optimizer).comm,  # type: ignore[union-attr]
    )


def per_rank(comm: Comm) -> None:
    """A file of each rank continues with the same bits; the file of another shard is refused, with the remedy."""
    for case in CASES:
        before = Training(comm, 2, case)
        before.train(0, 1, 2)
        with shared_folder(comm) as folder:
            state = {"model": before.model.state_dict(), "optimizer": before.optimizer.state_dict()}
            dgcopt.checkpoint.save(folder, state, 3)
            wanted = before.train(3, 4, 5)
            after = Training(comm, 2, case)
            step, state = dgcopt.checkpoint.load(folder) or (-1, {})
            assert step == 3
            after.model.load_state_dict(state["model"])
            after.optimizer.load_state_dict(state["optimizer"])
            assert same(after.train(3, 4, 5), wanted), case
            with_all = [
                torch.load(path, weights_only=True)["optimizer"] for path in sorted(folder.glob("step-*/rank-*.pt"))
            ]
        own = with_all[comm.rank][STATE_KEY]
        assert (own["shard"]["rank"], own["shard"]["size"]) == (comm.rank % 2, 2)
        assert (own["rank"], own["world_size"]) == (comm.rank // 2, 2)
        assert own["shard"]["place"]["0.weight"] == {
            "shape": [41, 6],
            "offset": [21 * (comm.rank % 2), 0],
            "size": [21 - comm.rank % 2, 6],
        }
        kept = memory_of(after.optimizer)
        words = (f"shard {1 - comm.rank % 2} of 2", f"this rank has shard {comm.rank % 2} of 2", "dgcopt.sharded.load")
        with refused(comm, ConfigError, *words):
            after.optimizer.load_state_dict(with_all[comm.rank ^ 1])
        assert not kept or same_memory(kept, memory_of(after.optimizer))
    plain = dgcopt.DistributedOptimizer(SGD(Wide().parameters(), lr=0.1), compression=DGC(0.2), comm=comm)
    with refused(comm, ConfigError, "is of shard", "this rank has whole parameters"):
        plain.load_state_dict({**with_all[comm.rank], "param_groups": plain.state_dict()["param_groups"]})
    with refused(comm, ConfigError, "sharded", "use dgcopt.checkpoint for all others"):
        dgcopt.sharded.state(plain)


def per_rank_among_other_replicas(comm: Comm) -> None:
    """Files of 3 replicas are shared out among 1 and 2 by `reshare`, shard by shard; no other size of shards fits."""
    training = Training(comm, 3, "TopK and AdamW")
    training.train(0, 1, 2)
    with shared_folder(comm) as folder:
        dgcopt.checkpoint.save(folder, {"optimizer": training.optimizer.state_dict()}, 3)
        states = [torch.load(path, weights_only=True) for path in sorted(folder.glob("step-*/rank-*.pt"))]
    for ranks in (2, 4, 8):
        new = [dgcopt.checkpoint.reshare(states, rank, ranks)["optimizer"][STATE_KEY] for rank in range(ranks)]
        for shard in range(2):
            old_of, new_of = ([one["memory"] for one in all_[shard::2]] for all_ in (_held(states), new))
            for kind, by_name in old_of[0].items():
                for name in by_name:
                    total = sum(one[kind][name] for one in old_of)
                    torch.testing.assert_close(sum(one[kind][name] for one in new_of), total)
        for rank, held in enumerate(new):
            assert (held["rank"], held["world_size"], held["shard"]["rank"]) == (rank // 2, ranks // 2, rank % 2)
    with refused(comm, CheckpointError, "in 2 shards", "3 ranks are no multiple", "dgcopt.sharded.state"):
        dgcopt.checkpoint.reshare(states, 0, 3)
    with refused(comm, CheckpointError, "not numbered replica by replica"):
        dgcopt.checkpoint.reshare([states[place] for place in (0, 2, 4, 1, 3, 5)], 0, 4)
    own = dgcopt.checkpoint.reshare(states, comm.rank, comm.size)["optimizer"]
    training.optimizer.load_state_dict(own)
    saved, loaded = (Training(comm, 3, "NoCompression and AdamW", names) for names in (("a", "b"), NAMES))
    saved.train(0, 1)
    loaded.train(0)
    loaded.optimizer.load_state_dict(saved.optimizer.state_dict())  # DTensors of a mesh that is not the parameters'
    loaded.train(2)
    other = Training(comm, 2, "TopK and AdamW")
    with refused(comm, ConfigError, "of 2, replica", "this rank has shard", "of 3"):
        other.optimizer.load_state_dict(own)


def _held(states: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [state["optimizer"][STATE_KEY] for state in states]


def averaging_through_torch(case: str, comm: Comm) -> None:
    """Averaging goes on with the same bits on the same mesh, each replica from its own weights."""
    before = Training(comm, 2, case)
    for outer in before.optimizer.averaging.outers:
        outer.param_groups[0]["lr"] /= 2  # comes along
    before.train(0, 1, 2)
    with shared_folder(comm) as folder:
        before.save(folder)
        wanted = before.train(3, 4, 5)
        after = Training(comm, 2, case)
        with warnings_of_dgcopt() as told:
            after.load(folder)
            assert same(after.train(3, 4, 5), wanted)
        assert not told, told
        other = Training(comm, 2, "DGC and SGD")
        with refused(comm, CheckpointError, "holds the state of averaging", "this optimizer has gradients"):
            dgcopt.sharded.load(other.optimizer, folder)
    assert same(after.sums(), before.sums())
    assert after.optimizer.averaging.step == 6


def averaging_whenever_a_group_was_added(comm: Comm) -> None:
    """A state saved after `add_param_group` goes on where the group was there from the start, with the same bits."""
    runs = [Training(comm, 2, "DiLoCo", added=added) for added in ("late", "early")]
    runs[0].train(0, 1, 2)
    with shared_folder(comm) as folder:
        runs[0].save(folder)
        runs[1].load(folder)
    assert same(*(run.train(3, 4, 5) for run in runs))
    assert same(*(run.sums() for run in runs))


def averaging_onto_another_mesh(before: int, after: int, case: str, comm: Comm) -> None:
    """Other replicas and shards: anchors and outer momentum are equal, means of weights and outer residuals stay."""
    first = Training(comm, before, case)
    first.train(0, 1, 2)
    kept, weights = first.averaged_memory(), first.mean_weights()
    with shared_folder(comm) as folder:
        first.save(folder)
        second = Training(comm, after, case)
        second.train(0)  # what a load replaces
        second.load(folder)
    loaded = second.averaged_memory()
    assert {*loaded} == {*kept}
    with second.optimizer.averaging.averaged():
        loaded |= {f"weight of {name}": tensor for name, tensor in whole(second.model).items()}
    for name, tensor in (kept | {f"weight of {name}": one for name, one in weights.items()}).items():
        torch.testing.assert_close(loaded[name], tensor, rtol=1e-6, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")
    assert second.optimizer.averaging.step == 3
    second.train(3, 4, 5)
    second.optimizer.averaging.average()
    comm_of = second.optimizer.averaging.comm
    dgcopt.check_replicas({name: param.to_local() for name, param in second.model.named_parameters()}, comm=comm_of)


def wrong_checkpoints(comm: Comm) -> None:
    """A checkpoint without dgcopt's entry, and one of another model, are refused; a forgotten entry is told."""
    training = Training(comm, 2)
    training.train(0, 1)
    with shared_folder(comm) as folder:
        training.save(folder)
        with refused(comm, CheckpointError, "under 'other'", "Give the key under which it was saved"):
            dgcopt.sharded.load(training.optimizer, folder, key="other")
        with torch.random.fork_rng():
            model = sharded(training.mesh["shard"], nn.Sequential(*(nn.Linear(40, 40) for _ in range(5))))
        optimizer = wrap(model, SGD(model.parameters(), lr=0.1), training.mesh, DGC(0.2))
        with refused(comm, ConfigError, "the checkpoint holds ", "which has shape (40"):
            dgcopt.sharded.load(optimizer, folder)
        forgetful = Training(comm, 2)
        with warnings_of_dgcopt() as told:
            forgetful.load(folder)
            forgetful.train(2)
            assert not told, told
            state = forgetful.state()
            dcp.load(state, checkpoint_id=folder)
            set_optimizer_state_dict(forgetful.model, forgetful.optimizer, state["optimizer"])
            assert not told and not any(memory_of(forgetful.optimizer).values())
            forgetful.train(2, 3)
        assert len(told) == 1 and "did not come along" in told[0] and "dgcopt.sharded.load" in told[0], told


@contextmanager
def warnings_of_dgcopt() -> Iterator[list[str]]:
    """What dgcopt logs as a warning within it."""
    told: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dgcopt").addHandler(handler)
    try:
        yield told
    finally:
        logging.getLogger("dgcopt").removeHandler(handler)


SCENARIOS: dict[str, Callable[[Comm], Any]] = {
    **{f"sharded state: torch, {case}": functools.partial(through_torch, 2, case) for case in CASES},
    **{f"sharded state: averaging, {case}": functools.partial(averaging_through_torch, case) for case in RULES},
    "sharded state: averaging, a group that was added": averaging_whenever_a_group_was_added,
    **{
        f"sharded state: averaging, {before} x {4 // before} to {after} x {4 // after}, {case}": functools.partial(
            averaging_onto_another_mesh, before, after, case
        )
        for before, after, case in (
            (2, 4, "DiLoCo"),
            (4, 2, "DiLoCo"),
            (4, 2, "SlowMo"),
            (2, 4, "LocalSGD"),
            (4, 2, "DiLoCo in fragments"),
        )
    },
    "sharded state: 2 x 2 to 4 x 1": functools.partial(onto_another_mesh, 2, 4, "DGC and SGD"),
    "sharded state: 4 x 1 to 2 x 2": functools.partial(onto_another_mesh, 4, 2, "DGC and SGD"),
    "sharded state: per rank": per_rank,
    "sharded state: wrong checkpoints": wrong_checkpoints,
}
"""Among four ranks."""

OF_SIX: dict[str, Callable[[Comm], Any]] = {
    "sharded state: 2 x 3 to 3 x 2": functools.partial(onto_another_mesh, 2, 3, "DGC and SGD"),
    "sharded state: averaging, 2 x 3 to 3 x 2, DiLoCo": functools.partial(averaging_onto_another_mesh, 2, 3, "DiLoCo"),
    "sharded state: 3 x 2 to 2 x 3": functools.partial(onto_another_mesh, 3, 2, "TopK and AdamW"),
    "sharded state: 3 x 2, other numbers of replicas": per_rank_among_other_replicas,
}
"""Among six ranks."""
