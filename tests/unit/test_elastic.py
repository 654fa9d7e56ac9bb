"""State without a launcher, and optimizers that rejoin worlds of other sizes through checkpoints."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dgcopt
from dgcopt import DGC, CheckpointError, ConfigError, DiLoCo, LocalSGD, SlowMo, elastic
from dgcopt.averaging import Averaging
from dgcopt.checkpoint import loading, saving
from dgcopt.comm import LocalComm, current_comm, launch
from dgcopt.flat.optimizer_state import STATE_KEY, kept_by
from dgcopt.gradients.synchronised import synchronised
from tests.support.worlds import Ranks, flat_gradient, flat_memory, same, small_batch, small_model, together

LR, MOMENTUM = 0.1, 0.9


class Worker:
    """A process of one rank with a State, averaged by a rule if there is one."""

    rule: Averaging | None = None

    def __init__(self, directory: Path, **values: Any) -> None:
        self.model = small_model()
        sgd = torch.optim.SGD(self.model.parameters(), LR, MOMENTUM)
        if self.rule is not None:
            self.optimizer = self.rule.attach(sgd, self.model.named_parameters())
        else:
            self.optimizer = dgcopt.DistributedOptimizer(sgd, self.model.named_parameters(), DGC())
        self.state = elastic.State(directory, model=self.model, optimizer=self.optimizer, **values)

    def train(self, seed: int = 0) -> None:
        inputs, targets = small_batch(seed=seed)
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(inputs), targets).backward()
        self.optimizer.step()

    def everything(self) -> dict[str, Any]:
        kept = {name: getattr(self.state, name) for name in self.state._names}
        return {"model": dict(self.model.state_dict()), "optimizer": self.optimizer.state_dict(), "values": kept}

    def lose_a_worker(self) -> None:
        """What `hvd.elastic.run` does after a collective has failed."""
        self.state.restore()
        self.state.on_reset()
        self.state.sync()


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """One process in place of Horovod, and how it was joined each time."""
    pytest.importorskip("horovod")
    calls: list[dict[str, Any]] = []

    class AsHorovod(LocalComm):
        wire = "horovod"
        elastic = True

    def init(wire: str, **settings: Any) -> dgcopt.Comm:
        calls.append({"wire": wire} | settings)
        return dgcopt.init("local", **settings)

    monkeypatch.setitem(launch._makers, "local", AsHorovod)
    monkeypatch.setattr(elastic, "init", init)
    dgcopt.shutdown()
    dgcopt.init("local", deadline=7, checksums=True)
    yield calls
    dgcopt.shutdown()


def copy_of(value: Any) -> Any:
    return dgcopt.broadcast_object(value)


@pytest.mark.parametrize("rule", [None, LocalSGD(2), DiLoCo(2, fragments=2), SlowMo(2, warmup_steps=2)], ids=str)
def test_back_to_what_was_committed(tmp_path: Path, joined, monkeypatch: pytest.MonkeyPatch, rule) -> None:
    monkeypatch.setattr(Worker, "rule", rule)
    worker = Worker(tmp_path, epoch=0, seen=torch.zeros(2), log=[])
    worker.state.sync()
    worker.train()
    worker.state.epoch, worker.state.seen, worker.state.log = 1, torch.ones(2), [0.5]
    worker.state.commit()
    committed = copy_of(worker.everything())

    worker.train(1)
    worker.state.epoch, worker.state.seen = 2, worker.state.seen + 1
    worker.state.log.append(0.4)
    assert not same(worker.everything(), committed)
    worker.lose_a_worker()
    assert same(copy_of(worker.everything()), committed)
    assert all(param.grad is None for param in worker.model.parameters())

    fresh = Worker(tmp_path, epoch=0, seen=torch.zeros(2), log=[])  # another worker, or another job
    fresh.train(5)
    fresh.state.sync()
    assert same(copy_of(fresh.everything()), committed)
    assert joined == [{"wire": "horovod", "deadline": 7, "checksums": True}]

    for expected in ("step-00000003", "step-00000004"):  # numbers go on where the commit was that was gone back to
        worker.state.commit()
        assert max(path.name for path in tmp_path.iterdir()) == expected


def test_the_start_is_a_commit(tmp_path: Path, joined) -> None:
    worker = Worker(tmp_path, epoch=0)
    worker.state.sync()
    start = copy_of(worker.everything())
    worker.train()
    worker.state.epoch = 1
    worker.lose_a_worker()
    assert same(copy_of(worker.everything()), start)


def test_without_others_to_come_the_start_is_no_commit(tmp_path: Path, joined) -> None:
    """Horovod without its Elastic: a script that died early begins anew, and finds nothing of before."""
    current_comm().elastic = False
    worker = Worker(tmp_path, epoch=0)
    assert not worker.state.sync() and not [*tmp_path.iterdir()]
    worker.state.commit()
    assert Worker(tmp_path, epoch=0).state.sync()


def test_residuals_since_the_last_commit_are_rolled_back(tmp_path: Path, joined) -> None:
    worker = Worker(tmp_path)
    worker.state.sync()
    memory = {"residual": {name: torch.ones_like(param) for name, param in worker.model.named_parameters()}}
    held = kept_by(0, 1, step=1, memory=memory)
    worker.optimizer.load_state_dict(worker.optimizer.state_dict() | {STATE_KEY: held})
    worker.lose_a_worker()
    kept = worker.optimizer.state_dict().get(STATE_KEY, {"memory": {}})["memory"]
    assert not any(tensor.any() for by_name in kept.values() for tensor in by_name.values())


def test_callbacks_see_what_was_committed(tmp_path: Path, joined) -> None:
    seen = []
    for _ in range(2):  # the second is a worker that comes later
        worker = Worker(tmp_path, epoch=0)

        def scale(worker: Worker = worker) -> None:
            seen.append(worker.state.epoch)
            worker.optimizer.param_groups[0]["lr"] = 5.0

        worker.state.register_reset_callbacks([scale])
        worker.state.sync()
        worker.state.epoch += 3
        worker.state.commit()
        worker.optimizer.param_groups[0]["lr"] = 1.0
        worker.lose_a_worker()
        assert worker.optimizer.param_groups[0]["lr"] == 5.0
    assert seen == [3, 3, 6]


@pytest.mark.parametrize("result", ["added", "removed"])
def test_changed_hosts(tmp_path: Path, joined, result: str) -> None:
    """All is committed before it is said, and every rank synchronises, even where Horovod would leave that out."""
    from horovod.common.exceptions import HostsUpdatedInterrupt
    from horovod.runner.elastic.worker import HostUpdateResult

    worker = Worker(tmp_path, epoch=0)
    worker.state.sync()
    worker.state.check_host_updates()
    worker.train()
    worker.state.epoch = 4
    now = copy_of(worker.everything())
    worker.state.on_hosts_updated(1, HostUpdateResult[result])
    with pytest.raises(HostsUpdatedInterrupt) as raised:
        worker.state.check_host_updates()
    assert raised.value.skip_sync is False
    worker.state.on_reset()
    worker.state.sync()
    assert same(copy_of(worker.everything()), now)
    worker.state.check_host_updates()


def test_wrong_states_are_refused(tmp_path: Path, joined) -> None:
    model = small_model()
    bare = torch.optim.SGD(model.parameters(), LR)
    with pytest.raises(ConfigError, match="DistributedOptimizer"):
        elastic.State(tmp_path, model=model, optimizer=bare)
    subset = type("Subset", (LocalComm,), {"wire": "horovod"})()
    averaged = LocalSGD(2).attach(torch.optim.SGD(model.parameters(), LR), comm=subset)
    with pytest.raises(ConfigError, match="without process_set"):
        elastic.State(tmp_path, model=model, optimizer=averaged)
    for name in ("sync", "_rank"):
        with pytest.raises(ConfigError, match=f"has '{name}' itself"):
            Worker(tmp_path, **{name: 1})
    worker = Worker(tmp_path, loader=object())
    with pytest.raises(ConfigError, match="holds a object"):
        worker.state.sync()
    optimizer = dgcopt.DistributedOptimizer(bare, model.named_parameters())
    synchronised(optimizer).comm = subset
    with pytest.raises(ConfigError, match="without process_set"):
        elastic.State(tmp_path, model=model, optimizer=optimizer)
    synchronised(optimizer).comm = type("Survivor", (LocalComm,), {"survives": True})()
    with pytest.raises(ConfigError, match=r"use dgcopt\.survive\.State"):
        elastic.State(tmp_path, model=model, optimizer=optimizer)


def test_without_horovod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a launcher starts scripts anew: from the newest commit, which a number named step names."""
    code = "import sys, dgcopt.elastic; sys.exit('horovod' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    monkeypatch.setitem(sys.modules, "horovod", None)
    begun = []

    @elastic.run
    def train(state: Any, steps: int) -> str:
        begun.append((state.step, state.counter.counted))
        for _ in range(steps):
            worker.train()
            state.step += 5
            state.counter.counted += 1
            state.commit()
            state.check_host_updates()
        return "trained"

    for steps, folders in ((0, []), (1, [5]), (3, [15, 20])):
        worker = Worker(tmp_path, step=0, counter=Counter())
        assert train(worker.state, steps) == "trained"
        assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{step:08d}" for step in folders]
    assert begun == [(0, 0), (0, 0), (5, 1)]
    for values in ({"step": 0}, {"step": 0, "counter": 0}, {"step": 0, "counter": Counter(), "more": 1}):
        with pytest.raises(CheckpointError, match=r"\['step'\] and states of \['counter'\].*another directory"):
            Worker(tmp_path, **values).state.sync()


class Counter:
    """Something with a state, as a scheduler has."""

    def __init__(self) -> None:
        self.counted = 0

    def state_dict(self) -> dict[str, int]:
        return {"counted": self.counted}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.counted = state["counted"]


# -- worlds that change ----------------------------------------------------------------------------------------------


def memory_of(world: Ranks) -> Tensor:
    """What all ranks hold back, added up."""
    states = [optimizer.state_dict()[STATE_KEY] for optimizer in world.optimizers]
    pairs = zip(states, world.models, strict=True)
    return sum(flat_memory(model, state["memory"].get("residual", {})) for state, model in pairs)


def resize(world: Ranks, size: int, directory: Path, commit: int) -> None:
    """Through a checkpoint, as State does: the ranks that stay rejoin, the others are lost or new."""
    was = len(world.models)
    states = [
        {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        for model, optimizer in zip(world.models, world.optimizers, strict=True)
    ]
    together(was, lambda comm: saving._save(directory, states[comm.rank], commit, comm, keep=2))
    world.step(99)  # of which nothing may be left
    for optimizer in world.optimizers:
        optimizer.zero_grad()
    for model in world.models[:-1]:  # the last one dies in a step
        nn.functional.cross_entropy(model(small_batch()[0]), small_batch()[1]).backward()

    new = Ranks(size, lambda p: torch.optim.SGD(p, LR), compression=DGC(0.05))
    new.models[:was], new.optimizers[:was] = world.models[:size], world.optimizers[:size]
    loaded = together(size, lambda comm: loading._load(directory, comm))
    world.comms = dgcopt.simulated_world(size)
    world.models, world.optimizers = new.models, new.optimizers
    for comm, model, optimizer, (_, state) in zip(world.comms, world.models, world.optimizers, loaded, strict=True):
        optimizer.rejoin(comm)
        optimizer.load_state_dict(state["optimizer"])
        model.load_state_dict(state["model"])


def test_the_account_survives_3_2_and_4_ranks(tmp_path: Path) -> None:
    world = Ranks(3, lambda p: torch.optim.SGD(p, LR), compression=DGC(0.05))
    computed, applied = torch.zeros(()), torch.zeros(())
    for seed, size in enumerate((3, 2, 4)):
        if size != len(world.models):
            before = memory_of(world)
            resize(world, size, tmp_path, commit=seed)
            assert before.norm() > 0.1
            torch.testing.assert_close(memory_of(world), before, rtol=1e-12, atol=1e-14)
            world.assert_replicas_equal()
        for step in range(4):
            for optimizer in world.optimizers:
                optimizer.zero_grad()
            world.backward(10 * seed + step)
            computed = computed + sum(flat_gradient(model) for model in world.models)
            for optimizer in world.optimizers:
                optimizer.synchronize()
            applied = applied + size * flat_gradient(world.models[0])
            for optimizer in world.optimizers:
                with optimizer.skip_synchronize():
                    optimizer.step()
            world.assert_replicas_equal()
    torch.testing.assert_close(applied + memory_of(world), computed, rtol=1e-9, atol=1e-11)


def test_a_rank_that_rejoins_keeps_what_it_remembers() -> None:
    world = Ranks(3, lambda p: torch.optim.SGD(p, LR, MOMENTUM), compression=DGC(0.05))
    for seed in range(3):
        world.step(seed)
    before = [optimizer.state_dict()[STATE_KEY] for optimizer in world.optimizers]
    world.backward(5)
    for comm, optimizer in zip(dgcopt.simulated_world(3), world.optimizers, strict=True):
        optimizer.rejoin(comm)
    assert same(before, [optimizer.state_dict()[STATE_KEY] for optimizer in world.optimizers])
    counted = [(optimizer.telemetry.steps, optimizer.telemetry.sent_bytes) for optimizer in world.optimizers]
    world.step(6)
    for (steps, sent), optimizer in zip(counted, world.optimizers, strict=True):
        assert steps == 3 and optimizer.telemetry.steps == 4 and optimizer.telemetry.sent_bytes > sent > 0
    world.step(6)
    world.assert_replicas_equal()
