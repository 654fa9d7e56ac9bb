"""Faults among two replicas of two shards each: FSDP2 within a replica, dgcopt across replicas; real processes.

Faults that all ranks survive share a launch. Each other one ends its own: some ranks with an error of dgcopt, and some,
which wait in FSDP2's own collectives when a rank is gone, with torch's.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import re
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD, AdamW

import dgcopt
from dgcopt import DGC, Comm
from dgcopt.collectives import AllGather
from dgcopt.flat.local_shard import local
from dgcopt.gradients.synchronised import synchronised
from tests.distributed.faults import forked
from tests.distributed.faults.messages import DAMAGES, Tap
from tests.distributed.faults.processes import ERRORS
from tests.distributed.faults.rules import Raised, Seen
from tests.distributed.faults.tracing import PACKAGE, Lines, raises
from tests.distributed.faults.training import digest

KIND = "sharded"
COUNT, QUICK = 200, 6
SIZE, STEPS, STRUCK = 4, 5, 3
DEADLINE, LONG, LIMIT = 20.0, 30.0, 240.0
"""Seconds: of waiting for a rank, of a rank that sleeps for longer than that, and until all must have ended."""
TOGETHER = 10
"""Faults that share a launch, at most."""

MOMENTUM = functools.partial(SGD, lr=0.05, momentum=0.9)
RECIPES: dict[str, tuple[Callable[..., torch.optim.Optimizer], Callable[[], Any]]] = {
    "DGC": (MOMENTUM, lambda: DGC(0.3)),
    "DGC that leaves early": (MOMENTUM, lambda: DGC(0.3, overlap=True)),
    "updates": (functools.partial(AdamW, lr=0.01), lambda: dgcopt.TopK(0.3)),
    "dense": (functools.partial(AdamW, lr=0.01), dgcopt.NoCompression),
    "signs": (MOMENTUM, dgcopt.EFSignSGD),
    "low rank": (MOMENTUM, lambda: dgcopt.PowerSGD(start_step=0)),
    "coded inside": (MOMENTUM, lambda: DGC(0.3)),
}
"""How to train; "coded inside" sends its reduce-scatter in int8 too."""

KINDS = {
    "not finite": (3, "NaN or Inf in a shard, a batch or a gradient"),
    "refused": (3, "a mesh or model that cannot be exchanged, on all ranks"),
    "apart": (2, "a mesh, a setting or a model that differs on one rank"),
    "changed": (2, "one rank, or one shard of both replicas, changes settings or state in training"),
    "kill": (3, "SIGKILL at a random line"),
    "exception": (3, "an exception at a random line"),
    "sleep": (1, "a rank that sleeps or stops longer than the deadline"),
    "damaged": (3, "a damaged message between replicas or shards"),
}
"""How often in twenty faults, and the row of the table."""

SURVIVED = ("not finite", "refused")
REFUSED = (
    *("a mesh of two dimensions", "the shard dimension", "not a mesh", "a process set", "native HSDP"),
    *("native HSDP and a mesh", "a replicate group of one", "a replicate group of one, given", "partly sharded"),
    *("several meshes", "optimizer before fully_shard", "wrapped before fully_shard", "whole parameters and a mesh"),
    *("a norm of some parameters", "a group outside the mesh", "rejoin", "a peerless average"),
    *("the state of another shard", "a checkpoint without the entry"),
)
APART = (
    "no mesh",
    "a mesh of two dimensions",
    "the shard dimension",
    "compressor",
    "buckets",
    "lr",
    "parameters",
    "op",
)
CHANGED = ("lr of a rank", "lr of a shard", "one more group", "older state", "one more step", "no gradients")


def plan(seed: int, count: int) -> Iterator[dict[str, Any]]:
    deck = [kind for kind, (times, _) in KINDS.items() for _ in range(times)]
    counts = dict.fromkeys(KINDS, 0)
    for number in range(count):
        rng = random.Random(f"{seed} {KIND} {number}")
        kind = [*KINDS][number % len(KINDS)] if count < len(deck) else deck[number % len(deck)]
        what = {
            "not finite": ("gradient", "shard", "batch"),
            "refused": REFUSED,
            "apart": APART,
            "changed": CHANGED,
            "sleep": ("sleep", "stop"),
            "damaged": ("sent", "received, checksums", "received, replicas compared"),
        }.get(kind, (kind,))
        place = counts[kind] + (rng.randrange(len(what)) if count < len(deck) else 0)
        counts[kind] += 1
        yield {
            "kind": kind,
            "what": what[place % len(what)],
            "recipe": rng.choice([*RECIPES]),
            "rank": rng.randrange(SIZE),
            "place": rng.random(),
            "value": rng.choice(["nan", "inf", "-inf"]),
            "error": rng.choice([*ERRORS]) if kind == "exception" else "",
            "damage": rng.choice(DAMAGES),
            "guard": what[place % len(what)],
            "control": rng.choice([True, False, None]),
            "byte": rng.random(),
            "bit": rng.randrange(8),
        }


def label(fault: dict[str, Any]) -> str:
    return f"2 x 2 shards: {KINDS[fault['kind']][1]}"


def describe(fault: dict[str, Any]) -> str:
    return f"{fault['kind']}: {fault['what']} on rank {fault['rank']}, {fault['recipe']}"


def run(faults: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], Seen]]:
    together = [fault for fault in faults if fault["kind"] in SURVIVED]
    while together:
        batch = together[:TOGETHER]
        reports = forked.run(SIZE, functools.partial(_survivable, batch), LIMIT)
        for fault in batch:
            told = [report.told.get(fault["id"]) for report in reports]
            if None in told:
                break
            yield fault, _of_survived(fault, told)
            together.remove(fault)
        else:
            continue
        seen = Seen()  # the fault in which the launch has ended
        for report in reports:
            seen.raised += report.raised
            if report.code is None:
                seen.late = f"rank {report.rank} had not ended {LIMIT:g} s after the start"
        seen.lost.append(f"the ranks did not go on: {[report.code for report in reports]}")
        yield fault, seen
        together.remove(fault)
    for fault in faults:
        if fault["kind"] not in SURVIVED:
            yield fault, _judge(fault, forked.run(SIZE, functools.partial(_ending, fault), LIMIT))


# -- a rank ------------------------------------------------------------------------------------------------------------


class Trained:
    """One rank's shards, and its optimizer."""

    def __init__(self, comm: Comm, mesh: DeviceMesh, recipe: str, odd: str = "", **settings: Any) -> None:
        self.comm = comm
        make, compressor = RECIPES[recipe]
        self.model = _sharded(mesh["shard"])
        self.spoils: list[Callable[[Tensor], None]] = []
        next(self.model.parameters()).register_post_accumulate_grad_hook(self._spoil)
        if recipe == "coded inside":
            dgcopt.sharded.compress_reduce_scatter(self.model, "int8")
        self.params = dict(self.model.named_parameters())  # the shards: an interrupted pass leaves whole ones in place
        params = [*self.params.values()]
        self.optimizer: Any = make(params[:-1] if odd == "parameters" else params)
        given: dict[str, Any] = {"mesh": mesh["replicate"], "compression": compressor(), "bucket_mb": 0.0005}
        given |= {
            "no mesh": {"mesh": None},
            "a mesh of two dimensions": {"mesh": mesh},
            "the shard dimension": {"mesh": mesh["shard"]},
            "compressor": {"compression": dgcopt.FP16()},
            "buckets": {"bucket_mb": 0.001},
            "op": {"op": "sum"},
        }.get(odd, {})
        if odd == "lr":
            self.optimizer.param_groups[0]["lr"] *= 2
        given |= {"first_bucket_mb": 0.0005, "comm": comm, **settings}
        dgcopt.DistributedOptimizer(self.optimizer, self.model.named_parameters(), **given)

    def _spoil(self, param: Tensor) -> None:
        while self.spoils:
            self.spoils.pop()(local(param.grad))  # type: ignore[arg-type]

    def backward(self, step: int, inputs: float = 0.0) -> None:
        self.optimizer.zero_grad()
        generator = torch.Generator().manual_seed(1000 * step + self.comm.rank)
        x, y = torch.randn(8, 6, generator=generator), torch.randn(8, 1, generator=generator)
        nn.functional.mse_loss(self.model(x + inputs), y).backward()

    def step(self, step: int) -> None:
        self.backward(step)
        torch.manual_seed(step)
        self.optimizer.step()

    def weights(self) -> str:
        return digest({name: local(param.detach()) for name, param in self.params.items()})

    def state(self) -> list[str]:
        """Hashes of the weights, and of what dgcopt keeps of them."""
        return [self.weights(), digest(self.optimizer.state_dict()["dgcopt"]["memory"])]


def _sharded(mesh: DeviceMesh) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(6, 11), nn.Tanh(), nn.Linear(11, 8), nn.Tanh(), nn.Linear(8, 1))
    for layer in model.children():
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _begun(checksums: bool = False) -> tuple[Comm, DeviceMesh]:
    comm = dgcopt.init(deadline=DEADLINE, checksums=checksums)
    return comm, init_device_mesh("cpu", (2, SIZE // 2), mesh_dim_names=("replicate", "shard"))


# -- faults that all survive -------------------------------------------------------------------------------------------


def _survivable(faults: list[dict[str, Any]], rank: int, tell: forked.Tell) -> None:
    comm, mesh = _begun()
    for fault in faults:
        act = _not_finite if fault["kind"] == "not finite" else _refused
        told = act(fault, comm, mesh)
        comm.run(AllGather(torch.zeros(1), label="next fault"))  # all ranks have come out of this one
        tell(**{fault["id"]: told})
    dgcopt.shutdown()


def _of_survived(fault: dict[str, Any], told: list[Any]) -> Seen:
    seen = Seen()
    for of in told:
        seen.lost += of["lost"]
        seen.unsaid += of["unsaid"]
        seen.raised += [Raised(**raised) for raised in of["raised"]]
    return seen


def _not_finite(fault: dict[str, Any], comm: Comm, mesh: DeviceMesh) -> dict[str, Any]:
    """A step with NaN or Inf in any shard is nobody's; the others are as if it had not been."""
    undisturbed, trained = (Trained(comm, mesh, fault["recipe"]) for _ in range(2))
    lost: list[str] = []
    for step in (0, 1, 2):
        undisturbed.step(step)
        trained.step(step)
    before, mine = trained.state(), comm.rank == fault["rank"]

    def spoil(grad: Tensor) -> None:
        if grad.numel():
            grad.view(-1)[int(fault["place"] * grad.numel())] = float(fault["value"])

    if mine and fault["what"] == "shard":
        trained.spoils.append(spoil)
    trained.backward(3, float(fault["value"]) if mine and fault["what"] == "batch" else 0.0)
    if mine and fault["what"] == "gradient":
        spoil(local(next(trained.model.parameters()).grad))  # type: ignore[arg-type]
    torch.manual_seed(3)
    trained.optimizer.step()
    if trained.state() != before:
        lost.append(f"rank {comm.rank}: weights or memory changed in a step with {fault['value']}")
    if trained.optimizer.telemetry.skipped != 1:
        lost.append(f"rank {comm.rank}: {trained.optimizer.telemetry.skipped} steps were skipped, not 1")
    for step in (4, 5):
        undisturbed.step(step)
        trained.step(step)
    if trained.state() != undisturbed.state():
        lost.append(f"rank {comm.rank}: afterwards not what an undisturbed training has")
    return {"lost": lost, "unsaid": [], "raised": []}


def _refused(fault: dict[str, Any], comm: Comm, mesh: DeviceMesh) -> dict[str, Any]:
    """What cannot be exchanged is refused on all ranks, in a sentence, and the wire goes on."""
    told: dict[str, Any] = {"lost": [], "unsaid": [], "raised": []}
    try:
        _wrap_badly(fault["what"], comm, mesh, fault["recipe"])
    except Exception as error:
        told["raised"].append(vars(Raised.of(comm.rank, error)))
        named = r"mesh|shard|group|whole model|parameter|checkpoint|code|restart|replicas"
        if not re.search(named, str(error)):
            told["unsaid"].append(f"rank {comm.rank}: names no place: {error}")
    else:
        told["unsaid"].append(f"rank {comm.rank}: {fault['what']} was not refused")
    return told


def _wrap_badly(what: str, comm: Comm, mesh: DeviceMesh, recipe: str) -> None:
    make, compressor = RECIPES[recipe]
    shard, replicate = mesh["shard"], mesh["replicate"]

    def wrap(model: nn.Module, optimizer: Any = None, rule: Any = None, **settings: Any) -> Any:
        optimizer = optimizer or make(model.parameters())
        rule = rule or compressor()
        return dgcopt.DistributedOptimizer(optimizer, model.named_parameters(), rule, comm=comm, **settings)

    plain = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 1))
    if what == "a mesh of two dimensions":
        wrap(_sharded(shard), mesh=mesh)
    elif what == "the shard dimension":
        wrap(_sharded(shard), mesh=shard)
    elif what == "not a mesh":
        wrap(_sharded(shard), mesh=[0, 2])
    elif what == "a process set":
        wrap(_sharded(shard), process_set=[0, 2])
    elif what == "native HSDP":
        wrap(_sharded(mesh))
    elif what == "native HSDP and a mesh":
        wrap(_sharded(mesh), mesh=replicate)
    elif what.startswith("a replicate group of one"):
        alone = init_device_mesh("cpu", (1, SIZE), mesh_dim_names=("replicate", "shard"))
        wrap(_sharded(alone["shard"]), mesh=alone["replicate"] if what.endswith("given") else None)
    elif what == "partly sharded":
        fully_shard(plain[0], mesh=shard)
        wrap(plain, mesh=replicate)
    elif what == "several meshes":
        fully_shard(plain[0], mesh=shard)
        fully_shard(plain, mesh=replicate)
        wrap(plain)
    elif what == "optimizer before fully_shard":
        early = make(plain.parameters())
        fully_shard(plain, mesh=shard)
        wrap(plain, early, mesh=replicate)
    elif what == "wrapped before fully_shard":
        wrapped = wrap(plain)
        fully_shard(plain, mesh=shard)
        for _ in range(2):
            plain(torch.ones(2, 6)).sum().backward()
            wrapped.step()
    elif what == "whole parameters and a mesh":
        wrap(plain, mesh=replicate)
    elif what == "a norm of some parameters":
        rules = {"0.*": DGC(0.1, clip=dgcopt.LocalClip(1.0)), "*": dgcopt.NoCompression()}
        wrap(_sharded(shard), rule=dgcopt.PerParameter(rules), mesh=replicate)
    elif what == "a group outside the mesh":
        Trained(comm, mesh, recipe).optimizer.add_param_group({"params": [*plain.parameters()]})
    elif what == "rejoin":
        Trained(comm, mesh, recipe).optimizer.rejoin()
    elif what == "a peerless average":
        model = _sharded(shard)
        dgcopt.averaging.SGP().attach(make(model.parameters()), model.named_parameters(), comm, mesh=replicate)
    elif what == "the state of another shard":
        trained = Trained(comm, mesh, recipe)
        trained.step(0)
        state = trained.optimizer.state_dict()
        state["dgcopt"]["shard"]["rank"] = 1 - state["dgcopt"]["shard"]["rank"]
        trained.optimizer.load_state_dict(state)
    else:
        import torch.distributed.checkpoint as dcp

        folder = dgcopt.broadcast_object(f"/tmp/dgcopt-sharded-{os.getppid()}-{time.time_ns()}", comm=comm)
        dcp.save({"other": torch.ones(1)}, checkpoint_id=folder)
        dgcopt.sharded.load(Trained(comm, mesh, recipe).optimizer, folder)


# -- faults that end a launch ------------------------------------------------------------------------------------------


def _ending(fault: dict[str, Any], rank: int, tell: forked.Tell) -> None:
    """A few steps, into the fault; each rank tells its weights after each step, and how it ended."""
    mine, states = rank == fault["rank"], list[str]()
    try:
        _train(fault, rank, mine, states, tell)
    except BaseException as error:
        frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        if not isinstance(error, dgcopt.DGCError) and not any(name.startswith(PACKAGE) for name in frames):
            tell(states=states, theirs=f"{type(error).__name__}: {error}"[:300])
            return
        raise


def _train(fault: dict[str, Any], rank: int, mine: bool, states: list[str], tell: forked.Tell) -> None:
    kind, what = fault["kind"], fault["what"]
    comm, mesh = _begun(checksums="checksums" in fault["guard"])
    settings = {"check_replicas_every": 1} if "compared" in fault["guard"] else {}
    if kind == "apart" and mine:
        tell(struck=True)
    trained = Trained(comm, mesh, fault["recipe"], what if kind == "apart" and mine else "", **settings)
    states.append(trained.weights())
    tell(states=states)
    try:
        lines, seen, kept = 0, 0, None
        for step in range(STEPS):
            is_struck = step == STRUCK
            if kind == "changed" and is_struck:
                tell(struck=True)
                change(trained, what, mine, rank % 2 == fault["rank"] % 2, kept)
            if kind in ("kill", "exception", "sleep") and mine and step >= STRUCK - 1:
                struck = Lines(1 + int(fault["place"] * lines) if is_struck else -1, functools.partial(strike, fault))
                if is_struck:
                    tell(struck=True)
                with struck.traced():
                    trained.step(step)
                lines = struck.count
            elif kind == "damaged" and mine and step >= STRUCK - 1:
                part = synchronised(trained.optimizer)
                assert part is not None
                guard = {**fault, "rank": part.comm.rank}
                with Tap([part.comm], guard, int(fault["place"] * seen) if is_struck else -1).tapped() as tap:
                    try:
                        trained.step(step)
                    finally:
                        if is_struck:
                            tell(struck=bool(tap.struck), place=tap.struck)
                seen = tap.seen
            else:
                trained.step(step)
            kept = trained.optimizer.state_dict() if step == 0 else kept
            states.append(trained.weights())
            tell(states=states)
    except BaseException:
        tell(last=trained.weights())
        raise
    dgcopt.shutdown()


def strike(fault: dict[str, Any]) -> None:
    if fault["kind"] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault["kind"] == "sleep":
        if fault["what"] == "stop" and os.fork() == 0:
            parent = os.getppid()
            time.sleep(LONG)
            with contextlib.suppress(OSError):
                os.kill(parent, signal.SIGCONT)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGSTOP) if fault["what"] == "stop" else time.sleep(LONG)
    else:
        raises(ERRORS[fault["error"]])()


def change(trained: Trained, what: str, mine: bool, of_shard: bool, kept: Any) -> None:
    """Change something between two steps, on one rank or on those that hold one shard."""
    optimizer = trained.optimizer
    if (what == "lr of a rank" and mine) or (what == "lr of a shard" and of_shard):
        optimizer.param_groups[0]["lr"] *= 2
    elif what == "one more group" and mine:
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    elif what == "older state" and mine:
        optimizer.load_state_dict(kept)
    elif what == "one more step" and mine:
        optimizer.step()
    elif what == "no gradients" and mine:
        optimizer.zero_grad()
        optimizer.step()


@functools.cache
def _undisturbed(recipe: str) -> list[list[str]]:
    nothing = {"kind": "", "what": "", "guard": "", "recipe": recipe, "rank": -1}
    reports = forked.run(SIZE, functools.partial(_ending, nothing), LIMIT)
    states = [report.told.get("states", []) for report in reports]
    assert all(len(of) == STEPS + 1 for of in states), [report.told for report in reports]
    return states


def _judge(fault: dict[str, Any], reports: list[forked.Report]) -> Seen:
    """What the ranks' reports show, beside an undisturbed training."""
    expected, kind = _undisturbed(fault["recipe"]), fault["kind"]
    seen = Seen(injected=fault["error"], struck=bool(reports[fault["rank"]].told.get("struck")))
    for report in reports:
        rank, states, last = report.rank, report.told.get("states", []), report.told.get("last")
        seen.raised += report.raised
        if report.code is None:
            seen.late = f"rank {rank} had not ended {LIMIT:g} s after the start"
        may_differ = kind == "changed" or (kind == "damaged" and "checksums" not in fault["guard"])
        before = STRUCK + 1 if may_differ else len(states)
        if states[:before] != expected[rank][:before]:
            seen.lost.append(f"rank {rank} differs from an undisturbed training: {report.told.get('place', '')}")
        made = len(states) - 1
        if last is not None and not may_differ and last not in expected[rank][made : made + 2]:
            seen.lost.append(f"rank {rank} ended between two states")
    if kind == "damaged":
        where = reports[fault["rank"]].told.get("place", "")
        after = [report.told.get("states", [])[STRUCK + 1 :] for report in reports]
        apart = [place for place in (0, 1) if after[place] != after[place + 2]]
        if not seen.raised and apart:
            seen.lost.append(f"replicas of shard {apart} differ, and nobody said so: {fault['damage']} in {where}")
        return seen
    others = [error for error in seen.raised if error.is_ours and error.rank != fault["rank"]]
    must_be_said = seen.struck and all(report.code == 0 and len(report.told["states"]) > STEPS for report in reports)
    if kind in ("apart", "changed") and must_be_said:
        seen.unsaid.append(f"{fault['what']}: nobody said anything")
    if kind in ("kill", "sleep") and seen.struck and not others and not must_be_said:
        theirs = [report.told.get("theirs") for report in reports]
        seen.unsaid.append(f"no error of dgcopt on any other rank: {theirs}")
    if kind in ("kill", "sleep") and others:
        replica = {fault["rank"] // 2 * 2, fault["rank"] // 2 * 2 + 1}
        named = {int(number) for error in others for number in re.findall(r"\d+", error.said)}
        if not named & replica:
            seen.unsaid.append(f"no error names a rank of replica {fault['rank'] // 2}: {others[0].said}")
    return seen
