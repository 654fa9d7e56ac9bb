"""Promise 6, and starting alike: checkpoints continue bit for bit, and one rank's state reaches all."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import dgcopt
from dgcopt import DGC, CheckpointError, Comm, ConfigError, DivergenceError, Warmup, hvd
from dgcopt.collectives import AllReduce, Barrier, Broadcast
from dgcopt.comm import LocalComm

from .optimizers import one_cycle, optimizer_classes, recipe_of
from .training import (
    TINY,
    Recipe,
    Replica,
    assert_close,
    assert_same_on_all_ranks,
    fingerprint,
    generator,
    make_model,
    memory_of,
    tensors_in,
    train,
)


@contextlib.contextmanager
def shared_folder(comm: Comm) -> Iterator[Path]:
    """A folder that rank 0 makes, and removes when all ranks are done with it."""
    made = tempfile.TemporaryDirectory(dir=os.environ.get("DGCOPT_TEST_RECORDS")) if comm.rank == 0 else None
    text = (made.name if made else "").encode().ljust(256)
    name = comm.run(Broadcast(torch.frombuffer(bytearray(text), dtype=torch.uint8), label="folder"))
    yield Path(bytes(name.tolist()).decode().strip())
    comm.run(Barrier(label="folder is done with"))
    if made:
        made.cleanup()


def fresh(comm: Comm, optimizer: str = "SGD") -> Replica:
    kinds = {
        "SGD": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01, dampening=0.1),
        "Adam": functools.partial(torch.optim.Adam, lr=0.01),
    }
    return Replica(
        Recipe(
            lambda named: kinds[optimizer]([param for _, param in named]),
            model=functools.partial(make_model, torch.float32),
            compression=DGC(0.02, warmup=Warmup(ratios=(0.5, 0.1), steps=2)),
            schedule=one_cycle,
            buckets=(*TINY.items(),),
        ),
        comm,
    )


def state_of(replica: Replica) -> dict[str, Any]:
    return {
        "model": replica.model.state_dict(),
        "optimizer": replica.optimizer.state_dict(),
        "schedule": replica.schedule.state_dict(),
    }


def put_back(replica: Replica, state: dict[str, Any]) -> None:
    replica.model.load_state_dict(state["model"])
    replica.optimizer.load_state_dict(state["optimizer"])
    replica.schedule.load_state_dict(state["schedule"])


def training_continues_bit_for_bit(comm: Comm) -> None:
    """Three steps, a checkpoint and three more equal three steps in a new run that loads it: on every rank."""
    with shared_folder(comm) as folder:
        for optimizer in ("SGD", "Adam"):
            whole = fresh(comm, optimizer)
            train([whole], range(3))
            dgcopt.checkpoint.save(folder / optimizer, state_of(whole), 3, comm)
            train([whole], range(3, 6))
            resumed = fresh(comm, optimizer)
            train([resumed], range(100, 101))  # an optimizer that has been used forgets what it was
            loaded = dgcopt.checkpoint.load(folder / optimizer, comm)
            assert loaded is not None and loaded[0] == 3
            put_back(resumed, loaded[1])
            train([resumed], range(3, 6))
            first, second = memory_of(whole.optimizer), memory_of(resumed.optimizer)
            assert {k: set(v) for k, v in first.items()} == {k: set(v) for k, v in second.items()}
            for kind, by_name in first.items():
                for name, tensor in by_name.items():
                    assert torch.equal(tensor, second[kind][name]), f"{optimizer}: {kind} of {name} differs"
            for one, other in zip(whole.parameters, resumed.parameters, strict=True):
                assert torch.equal(one, other), f"{optimizer}: parameters differ after resuming"
            assert fingerprint(tensors_in(state_of(whole))) == fingerprint(tensors_in(state_of(resumed)))


def damage(comm: Comm, change: Callable[[], object]) -> None:
    """Rank 0 changes the checkpoint while the others wait."""
    comm.run(Barrier(label="before damage"))
    if comm.rank == 0:
        change()
    comm.run(Barrier(label="after damage"))


def expect_checkpoint_error(action: Callable[[], object], *words: str) -> None:
    try:
        action()
    except CheckpointError as error:
        assert all(word in str(error) for word in words), f"does not say {words}: {error}"
    else:
        raise AssertionError(f"no CheckpointError about {words}")


def damaged_checkpoints_are_passed_over(comm: Comm) -> None:
    """Damage to one rank's part counts for all ranks; without a valid one left, all of them say so."""
    last = comm.size - 1
    with shared_folder(comm) as folder:
        assert dgcopt.checkpoint.load(folder, comm) is None, "an empty folder holds no checkpoint"
        for step in (1, 2, 3):
            dgcopt.checkpoint.save(folder, {"w": torch.full((100,), float(step + comm.rank))}, step, comm, keep=3)

        def loads(step: int) -> None:
            loaded = dgcopt.checkpoint.load(folder, comm)
            assert loaded is not None and loaded[0] == step and loaded[1]["w"][0] == step + comm.rank

        loads(3)
        part = folder / "step-00000003" / f"rank-{last}.pt"
        damage(comm, lambda: os.truncate(part, part.stat().st_size // 2))
        loads(2)
        damage(comm, lambda: (folder / "step-00000002" / "manifest.json").unlink())
        loads(1)

        def flip() -> None:
            path = folder / "step-00000001" / "rank-0.pt"
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 1
            path.write_bytes(content)

        damage(comm, flip)
        expect_checkpoint_error(lambda: dgcopt.checkpoint.load(folder, comm), "no checkpoint", str(folder))


def a_failed_save_fails_everywhere(comm: Comm) -> None:
    """And leaves the checkpoint before it as it was."""
    with shared_folder(comm) as folder:
        dgcopt.checkpoint.save(folder, {"step": 1}, 1, comm)
        state = {"step": 2, "what": (lambda: 0) if comm.rank == comm.size - 1 else 0}
        save = functools.partial(dgcopt.checkpoint.save, folder, state, 2, comm)
        expect_checkpoint_error(save, f"rank {comm.rank}")
        # after a loss any of them may be rank 0: to none of them are their common checkpoints another run's
        if comm.rank == comm.size - 1:
            dgcopt.checkpoint.save(folder, {"step": 3}, 3, LocalComm())
            assert sorted(path.name for path in folder.glob("*step-*")) == ["step-00000001", "step-00000003"]
        comm.run(Barrier(label="the last rank has saved"))
        if comm.size > 1:
            save = functools.partial(dgcopt.checkpoint.save, folder, {"step": 4}, 4, comm)
            expect_checkpoint_error(save, f"rank {comm.rank}", *["of another run (process"] * (comm.rank == 0))
        assert dgcopt.checkpoint.load(folder, LocalComm()) == (3, {"step": 3})
        dgcopt.checkpoint.save(folder, {"step": 4}, 4, comm)
        assert dgcopt.checkpoint.load(folder, comm) == (4, {"step": 4})


def another_number_of_ranks(comm: Comm) -> None:
    """What N ranks wrote, one process loads with the sum of all that they held back; and the other way round."""
    with shared_folder(comm) as folder:
        for optimizer in ("SGD", "Adam"):
            whole = fresh(comm, optimizer)
            for step in (1, 2):
                train([whole], range(step, step + 1))
                dgcopt.checkpoint.save(folder / optimizer, state_of(whole), step, comm)
            sums = {
                (kind, name): comm.run(AllReduce(tensor.double(), op="sum", label=f"{kind} of {name}"))
                for kind, by_name in memory_of(whole.optimizer).items()
                for name, tensor in by_name.items()
            }
            loaded = dgcopt.checkpoint.load(folder / optimizer, LocalComm())
            assert loaded is not None and loaded[0] == 2
            memory = loaded[1]["optimizer"]["dgcopt"]["memory"]
            assert sums.keys() == {(kind, name) for kind, by_name in memory.items() for name in by_name}
            for (kind, name), expected in sums.items():
                assert_close([memory[kind][name].double()], [expected], 1e-6, f"{optimizer}: {kind} of {name}")
            assert any(tensor.any() for (kind, _), tensor in sums.items() if kind == "residual")

            alone = fresh(LocalComm(), optimizer)
            put_back(alone, loaded[1])
            train([alone], range(3, 5))
            assert_same_on_all_ranks(comm, alone.parameters, f"{optimizer}, each in one process")
            write = functools.partial(dgcopt.checkpoint.save, folder / optimizer, state_of(alone), 4, LocalComm())
            damage(comm, write)  # by rank 0 alone
            together = fresh(comm, optimizer)
            grown = dgcopt.checkpoint.load(folder / optimizer, comm)
            assert grown is not None and grown[0] == 4
            put_back(together, grown[1])
            train([together], range(5, 7))
            assert_same_on_all_ranks(comm, together.parameters, f"{optimizer}, of one process")

            part = folder / optimizer / "step-00000002" / f"rank-{comm.size - 1}.pt"
            damage(comm, lambda part=part: (shutil.rmtree(part.parents[1] / "step-00000004"), part.unlink()))
            expect_checkpoint_error(
                lambda name=optimizer: dgcopt.checkpoint.load(folder / name, LocalComm()), "no checkpoint", part.name
            )


def broadcast_object(comm: Comm) -> None:
    """From a rank other than 0, to the bit; and what cannot be sent is an error on every rank, not a hang."""
    root = comm.size - 1
    tensors = [torch.arange(5), torch.tensor(1 + 2j), torch.ones(2, 0), torch.randn(3, generator=generator(1)).half()]
    value = {"floats": [math.inf, -0.0, 0.1], ("a", 1): (None, True, "\u00e9"), 7: tensors}
    got = dgcopt.broadcast_object(value if comm.rank == root else comm, root, comm)
    assert repr(got) == repr(value), got
    assert fingerprint(tensors_in(got)) == fingerprint(tensors)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    optimizer.param_groups[0]["odd"] = object() if comm.rank == root else None
    for send in (
        lambda: dgcopt.broadcast_object({1, 2} if comm.rank == root else 0, root, comm),
        lambda: dgcopt.broadcast_optimizer_state(optimizer, root, comm),
    ):
        try:
            send()
        except ConfigError as error:
            assert f"of rank {root} cannot be sent" in str(error), error
        else:
            raise AssertionError("sent what cannot be sent")


def broadcast_parameters(comm: Comm) -> None:
    """From a rank other than 0, for tensors of several dtypes and shapes, in place."""
    root = comm.size - 1
    model = make_model(seed=comm.rank)
    model.register_buffer("count", torch.tensor(comm.rank, dtype=torch.int64))
    model.register_buffer("low", torch.full((3,), comm.rank, dtype=torch.bfloat16))
    model.register_buffer("mask", torch.tensor([comm.rank % 2 == 1, True]))
    before = [param.data_ptr() for param in model.parameters()]
    dgcopt.broadcast_parameters(model.state_dict(), root, comm)
    expected = make_model(seed=root)
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, other)
    assert model.count == root and model.low.tolist() == [root] * 3 and model.mask.tolist() == [root % 2 == 1, True]
    assert before == [param.data_ptr() for param in model.parameters()], "tensors were replaced"


def assert_state_is_the_roots(comm: Comm, optimizer: torch.optim.Optimizer, root: int, what: str) -> None:
    """After broadcast_optimizer_state: the same bits on all ranks, and those that the root had."""
    groups = repr(optimizer.state_dict()["param_groups"])
    before = [tensor.double() for tensor in tensors_in(optimizer.state_dict()["state"])]
    dgcopt.broadcast_optimizer_state(optimizer, root, comm)
    after = optimizer.state_dict()
    text = repr([after["state"].keys(), after["param_groups"]])
    bits = [torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8), *tensors_in(after["state"])]
    assert_same_on_all_ranks(comm, bits, what)
    if comm.rank == root:
        now = [tensor.double() for tensor in tensors_in(after["state"])]
        assert fingerprint(before) == fingerprint(now), f"{what}: the root's own state changed"
        assert groups == repr(after["param_groups"]), f"{what}: the root's own settings changed"


def broadcast_optimizer_state(comm: Comm) -> None:
    """Of every optimizer in torch, from the only rank that has any; and of wrapped ones that have come apart."""
    root = comm.size - 1
    for name, kind in optimizer_classes().items():
        replica = Replica(recipe_of(kind, {"momentum": 0.9} if name == "SGD" else {}))
        if comm.rank == root:
            train([replica], range(2))
            assert tensors_in(replica.optimizer.state_dict()["state"])
            replica.optimizer.param_groups[0]["lr"] *= 0.5
        assert_state_is_the_roots(comm, replica.optimizer, root, f"bare {name}")
    for name in ("SGD", "Adam"):
        replica = fresh(comm, name)
        train([replica], range(3))
        residuals = fingerprint(tensors_in(memory_of(replica.optimizer)))
        for tensor in tensors_in(replica.optimizer.state_dict()["state"]):
            tensor += comm.rank
        assert_state_is_the_roots(comm, replica.optimizer, root, f"wrapped {name}")
        assert residuals == fingerprint(tensors_in(memory_of(replica.optimizer))), "a rank's own memory was touched"


def rank_0_resumes_and_tells_the_others(comm: Comm) -> None:
    """Horovod's way: rank 0 loads the only file that there is, and broadcasts; the ratio warm-up goes on."""
    hvd.init()
    ways: list[Callable[..., None]] = [dgcopt.broadcast_optimizer_state, hvd.broadcast_optimizer_state]
    if comm.wire == "horovod":
        import horovod.torch

        ways.append(horovod.torch.broadcast_optimizer_state)

    sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    dgc = DGC(0.02, warmup=Warmup(ratios=(0.5, 0.25, 0.1), steps=2))
    cases: list[tuple[Callable[..., torch.optim.Optimizer], dgcopt.Compressor | None]] = [
        (sgd, None),
        (sgd, dgc),
        (functools.partial(sgd, weight_decay=0.01, dampening=0.1), dgc),
        (functools.partial(sgd, momentum=0.0), dgc),  # without any state of its own
        (sgd, dgcopt.PowerSGD(rank=1, start_step=0)),
        (functools.partial(torch.optim.Adam, lr=0.01), None),
        (functools.partial(torch.optim.Adam, lr=0.01), dgcopt.TopK(0.1, source="update")),
    ]
    for make, compression in cases:
        recipe = Recipe(
            lambda named, make=make: make([param for _, param in named]),
            functools.partial(make_model, torch.float32),
            compression,
            buckets=(*TINY.items(),),
        )
        whole = Replica(recipe, comm)
        train([whole], range(3))
        for group in whole.optimizer.param_groups:
            group["lr"] /= 2
        saved = copy.deepcopy({"model": whole.model.state_dict(), "optimizer": whole.optimizer.state_dict()})
        for way in ways:
            what = f"{make}, {compression}, {way}"
            resumed = Replica(recipe, comm)
            if comm.rank == 0:
                resumed.model.load_state_dict(saved["model"])
                resumed.optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
            dgcopt.broadcast_parameters(resumed.model.state_dict(), comm=comm)
            way(resumed.optimizer, root_rank=0)
            state = resumed.optimizer.state_dict()
            assert state["dgcopt"]["step"] == 3, what
            assert resumed.optimizer.param_groups[0]["lr"] == whole.optimizer.param_groups[0]["lr"], what
            assert_same_on_all_ranks(comm, tensors_in([state["state"], state["dgcopt"]["shared"]]), f"state of {what}")
            if comm.rank:
                assert not state["dgcopt"]["memory"], f"{what}: others were given memory"
            else:
                held, kept = (each["dgcopt"]["memory"] for each in (saved["optimizer"], state))
                same = [torch.equal(kept[kind][name], held[kind][name]) for kind in held for name in held[kind]]
                assert all(same), f"{what}: rank 0 lost its memory"
            train([resumed], range(3, 4))
            before = resumed.optimizer.telemetry.payload_bytes  # type: ignore[attr-defined]
            train([resumed], range(4, 5))
            sent = resumed.optimizer.telemetry.payload_bytes - before  # type: ignore[attr-defined]
            assert_same_on_all_ranks(comm, resumed.parameters, f"trained after {what}")
            if way is ways[0]:
                train([whole], range(3, 4))
                before = whole.optimizer.telemetry.payload_bytes  # type: ignore[attr-defined]
                train([whole], range(4, 5))
                expected = whole.optimizer.telemetry.payload_bytes - before  # type: ignore[attr-defined]
            assert sent == expected, f"{what}: the warm-up did not go on at the loaded step"


def different_starts(comm: Comm) -> None:
    """Without a broadcast, ranks that start from different weights are told so, all of them, and can go on after it."""
    model = make_model(seed=1 + (comm.rank == comm.size - 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dgcopt.DistributedOptimizer(optimizer, model.named_parameters(), DGC(0.1), comm=comm)
    model(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
    try:
        optimizer.step()
    except DivergenceError as error:
        for words in (f"rank {comm.rank}", "0.weight", f"[{comm.size - 1}]", "dgcopt.broadcast_parameters"):
            assert words in str(error), error
    else:
        raise AssertionError("different weights were not noticed")
    dgcopt.broadcast_parameters(model.state_dict(), comm=comm)
    optimizer.zero_grad()
    model(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
    optimizer.step()
    assert_same_on_all_ranks(comm, list(model.parameters()), "after the broadcast")


SCENARIOS: dict[str, Callable[[Comm], Any]] = {
    **{
        f"checkpoint: {function.__name__}": function
        for function in (
            training_continues_bit_for_bit,
            damaged_checkpoints_are_passed_over,
            a_failed_save_fails_everywhere,
            another_number_of_ranks,
        )
    },
    **{
        f"start alike: {function.__name__}": function
        for function in (
            broadcast_parameters,
            broadcast_object,
            broadcast_optimizer_state,
            rank_0_resumes_and_tells_the_others,
            different_starts,
        )
    },
}
