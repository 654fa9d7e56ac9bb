"""One rank of a training that something happens to, or all ranks where they are simulated.

launched.py PLAN.json    does what scripts/inject_faults.py has planned, and records what it saw as lines of JSON
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dgcopt
from dgcopt import Comm, DGCError, MismatchError, PayloadError
from dgcopt.collectives import AllGather, AllReduce, AllToAll, Barrier, Collective
from tests.distributed.faults.training import (
    BITS_ONLY,
    KEEPS_THE_GRADIENT,
    STEPS,
    Fault,
    Problems,
    Rank,
    Team,
    undisturbed,
)
from tests.support.meeting import together

SAVE_EVERY, FROZEN = 2, 15


def record(rank: int, scenario: str, **facts: Any) -> None:
    path = Path(os.environ["DGCOPT_TEST_RECORDS"]) / f"rank-{rank}.jsonl"
    with path.open("a") as file:
        file.write(json.dumps({"scenario": scenario, "rank": rank, "at": time.time(), **facts}) + "\n")


# -- faults that a training survives ---------------------------------------------------------------------------------


class Survivable:
    """Many faults in one launch, each of which leaves the wire as it was."""

    def __init__(self, make: Callable[[], Sequence[Comm]], plan: dict[str, Any], folder: Path) -> None:
        self.make, self.folder, self.checksums = make, folder, False
        self.comms = self.world()
        recipes = {fault["recipe"] for fault in plan["faults"]}
        self.expected = {recipe: undisturbed(self.world(), recipe, plan["steps"]) for recipe in sorted(recipes)}
        self.teams = {recipe: Team(self.world(), recipe) for recipe in self.expected}
        self.at = dict.fromkeys(self.teams, 0)
        self.saved = False

    def world(self) -> Sequence[Comm]:
        comms = self.make()
        for comm in comms:
            comm.checksums = self.checksums
        return comms

    def run(self, fault: Fault) -> None:
        self.checksums = fault["checksums"]
        for comm in (*self.comms, *(rank.comm for team in self.teams.values() for rank in team.ranks)):
            comm.checksums = self.checksums
        team, problems = getattr(self, fault["kind"].replace(" ", "_").replace("-", "_"))(fault)
        for rank in team.ranks if team else []:
            sums = rank.mass() if rank.recipe not in BITS_ONLY else None
            record(rank.comm.rank, fault["id"], problems=problems, digest=rank.digests()[0], mass=sums)
        for comm in self.comms if not team else ():
            record(comm.rank, fault["id"], problems=problems)

    def go_on(self, team: Team, recipe: str, start: int, stop: int) -> Problems:
        """Train on, and be where an undisturbed training is, bit for bit."""
        expected = self.expected[recipe]
        for step in range(start, stop):
            if team.digests() != expected[step]:
                return [("lost state", f"not what an undisturbed training has after {step} steps")]
            team.step(step)
        return [] if team.digests() == expected[stop] else [("lost state", f"{stop} steps are not those undisturbed")]

    def not_finite(self, fault: Fault) -> tuple[Team, Problems]:
        """A step with NaN or Inf in a gradient is nobody's; the next ones are as if it had not been."""
        recipe, problems = fault["recipe"], []
        team, step, before = self.teams[recipe], self.at[recipe], self.teams[recipe].digests()

        def disturb(rank: Rank, moment: str) -> None:
            param = dict(rank.model.named_parameters())[fault["parameter"]]
            if rank.comm.rank != fault["rank"] and not fault["everywhere"]:
                return
            if moment == "before backward" and fault["moment"] == "in backward":
                hook = param.register_hook(lambda grad: (hook.remove(), spoil(grad.clone(), fault))[1])
            elif moment == "after backward" == fault["moment"]:
                spoil(param.grad, fault)

        team.step(step, disturb, void=True)
        if team.digests() != before:
            problems.append(("lost state", "parameters or memory changed in a step with NaN or Inf"))
        for _ in range(fault["then"]):
            team.step(self.at[recipe])
            self.at[recipe] += 1
        if team.digests() != self.expected[recipe][self.at[recipe]]:
            problems.append(("lost state", "afterwards not what an undisturbed training has"))
        return team, problems

    def disagreement(self, fault: Fault) -> tuple[None, Problems]:
        """One rank builds something else: found before anything is sent, by all."""
        try:
            Team(self.world(), fault["recipe"], fault).step(0)
        except MismatchError as error:
            return None, [] if f"rank {fault['rank'] or 1} has" in str(error) else [("unnoticed", f"said {error}")]
        return None, [("unnoticed", f"no MismatchError about {fault['what']}")]

    def checkpoint(self, fault: Fault) -> tuple[Team, Problems]:
        """The newest checkpoint is damaged: the one before it is found by all, and training goes on from there."""
        (comm,), recipe, good = self.comms, fault["recipe"], self.folder / "intact"
        team = Team(self.comms, recipe)
        (me,) = team.ranks
        if not self.saved:
            self.saved = True
            for step in range(6):
                team.step(step)
                if (step + 1) % 2 == 0:
                    dgcopt.checkpoint.save(good, me.state(), step + 1, comm, keep=3)
        comm.run(Barrier(label="before damage"))
        bad = self.folder / fault["id"].replace("/", "-")
        if comm.rank == 0:
            shutil.copytree(good, bad)
            for step in (6, 4)[: fault["how_many"]]:
                damage(bad / f"step-{step:08d}", fault)
        comm.run(Barrier(label="after damage"))
        loaded = dgcopt.checkpoint.load(bad, comm)
        if loaded is None:
            return team, [("lost state", "no checkpoint was found")]
        # a bit of the manifest that says which version wrote it does not matter
        allowed = {6 - 2 * fault["how_many"]} | ({6, 4} if "manifest" in fault["what"] else set())
        if loaded[0] not in allowed:
            return team, [("lost state", f"found step {loaded[0]}, not {sorted(allowed)}")]
        me.put_back(loaded[1])
        return team, self.go_on(team, recipe, loaded[0], STEPS)

    def payload(self, fault: Fault) -> tuple[Team, Problems]:
        """A message loses a bit where it is sent: all see it, none applies anything, and the checkpoint helps."""
        comms, recipe, problems = self.world(), fault["recipe"], []
        team = Team(comms, recipe)
        for step in range(fault["step"]):
            with flipped(comms, fault, armed=False) as count:
                team.step(step)
            if step == fault["step"] - 2:
                states = [rank.state() for rank in team.ranks]
                if len(comms) == 1:
                    dgcopt.checkpoint.save(self.folder / fault["id"].replace("/", "-"), states[0], step + 1, comms[0])
        before, said = team.digests(), ""
        fault = {**fault, "which": fault["which"] % count[fault["rank"]]} if fault["rank"] in count else fault
        try:
            with flipped(comms, fault):
                team.step(fault["step"])
        except PayloadError as error:
            said = str(error)
        if not said:
            problems.append(("unnoticed", "no PayloadError although a bit was flipped"))
        elif f"from rank {fault['rank']}" not in said and "have other bits than its rank 0" not in said:
            problems.append(("unnoticed", f"does not name rank {fault['rank']}: {said}"))
        after = team.digests()
        if recipe in KEEPS_THE_GRADIENT:
            before, after = ([(same, "") for same, _ in digests] for digests in (before, after))
        if after != before:
            problems.append(("lost state", "parameters or memory changed in a step with a damaged message"))
        if len(comms) > 1:
            team = Team(self.world(), recipe)
            for rank, state in zip(team.ranks, states, strict=True):
                rank.put_back(state)
        else:
            loaded = dgcopt.checkpoint.load(self.folder / fault["id"].replace("/", "-"), comms[0])
            if loaded is None:
                return team, [*problems, ("lost state", "no checkpoint was found")]
            team.ranks[0].put_back(loaded[1])
        return team, problems + self.go_on(team, recipe, fault["step"] - 1, STEPS)


def spoil(grad: Tensor, fault: Fault) -> Tensor:
    """Put NaN or Inf at a random place, in place."""
    values = (grad._values() if grad.is_sparse else grad).view(-1)
    values[fault["element"] % len(values)] = float(fault["value"])
    return grad


def damage(folder: Path, fault: Fault) -> None:
    """What disks and people do to one file of a checkpoint."""
    how, _, what = fault["what"].partition(" ")
    path = folder / ("manifest.json" if what == "manifest" else f"rank-{fault['rank']}.pt")
    size = path.stat().st_size
    if how == "missing":
        path.unlink()
    elif how == "truncated":
        os.truncate(path, int(size * fault["place"]))
    else:
        content = bytearray(path.read_bytes())
        content[int(size * fault["place"])] ^= 1 << fault["bit"]
        path.write_bytes(content)


@contextlib.contextmanager
def flipped(comms: Sequence[Comm], fault: Fault, armed: bool = True) -> Iterator[dict[int, int]]:
    """One message of the step loses a bit: where it is sent, or where its sum or itself has arrived.

    Yields how many messages there were to choose from, by rank, for those who only want to know (not `armed`).
    """
    seen: dict[int, int] = {}

    def meet(comm: Comm, tensor: Tensor) -> Tensor:
        place = seen.get(comm.rank, 0)
        seen[comm.rank] = place + 1
        if armed and comm.rank == fault["rank"] and place == fault["which"]:
            raw = tensor.view(-1).view(torch.uint8)
            raw[fault["byte"] % len(raw)] ^= 1 << fault["bit"]
        return tensor

    def start(comm: Comm, original: Callable[..., Any], collective: Collective) -> Any:
        if fault["where"] == "sent" and isinstance(collective, AllGather) and collective.tensor.numel():
            collective.tensor = meet(comm, collective.tensor.clone())
        return original(collective)

    def wait(comm: Comm, original: Callable[..., Any], handle: Any, deadline: float | None = None) -> Tensor:
        result = original(handle, deadline)
        if fault["where"] == "sum" and isinstance(handle.collective, AllReduce):
            meet(comm, result)
        by_row = isinstance(handle.collective, AllGather | AllToAll)
        if fault["where"] == "received" and by_row and comm.rank == fault["rank"]:
            meet(comm, result[(comm.rank + 1) % comm.size])  # the others' part, not its own
        return result

    for comm in comms:
        comm.start, comm.wait = (functools.partial(f, comm, getattr(comm, f.__name__)) for f in (start, wait))  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        for comm in comms:
            del comm.start, comm.wait  # type: ignore[method-assign]


# -- faults that end a launch, and what comes after --------------------------------------------------------------------


def end_badly(comm: Comm, plan: dict[str, Any], folder: Path) -> None:
    """Train, with checkpoints, into one fault; every rank records how it ended, and ends as a user's script would."""
    fault: Fault = plan["faults"][0]
    team = Team([comm], fault["recipe"])
    (me,) = team.ranks
    mine = comm.rank == fault["rank"]
    last: tuple[str, str] | None = None
    kept: dict[str, Any] = {}

    def disturb(rank: Rank, moment: str) -> None:
        if step != fault["step"] or not mine:
            return
        if moment == "before backward" and fault["moment"] == "in backward":
            param = dict(me.model.named_parameters())[fault["parameter"]]
            param.register_hook(lambda grad: strike(me, fault, kept))
        elif moment == fault["moment"]:
            strike(me, fault, kept)

    record(comm.rank, "joined")
    try:
        for step in range(STEPS):
            flips = fault["kind"] == "payload" and step == fault["step"]
            last = me.digests()
            with flipped([comm], fault) if flips else contextlib.nullcontext():
                if flips and mine:
                    record(comm.rank, "struck")
                team.step(step, disturb)
            last = None
            record(comm.rank, f"step {step + 1}", digest=me.digests()[0])
            if (step + 1) % SAVE_EVERY == 0:
                if mine and fault["moment"] == "while saving" and step >= fault["step"]:
                    record(comm.rank, "struck")
                    kill_while_saving(fault)
                kept = me.optimizer.state_dict()
                dgcopt.checkpoint.save(folder, me.state(), step + 1, comm)
                record(comm.rank, "saved", step=step + 1)
    except Exception as error:
        now = me.digests()
        # what the fault itself has changed on its rank is not held against the exchange
        may_keep = mine or fault["recipe"] in KEEPS_THE_GRADIENT
        touched = last is not None and (now[0] != last[0] or (not may_keep and now[1] != last[1]))
        names = [kind.__name__ for kind in type(error).__mro__]
        record(comm.rank, "ended", names=names, dgc=isinstance(error, DGCError), said=str(error), touched=touched)
        # launchers end the other ranks when the first one has ended; each finds a mismatch by itself, and is to say so
        together("ended", 10 if fault["kind"] == "mismatch" else 1)
        raise
    record(comm.rank, "ended", names=[], dgc=False, said="", touched=False)


def strike(me: Rank, fault: Fault, kept: dict[str, Any]) -> None:
    """Do to this rank what was planned."""
    record(me.comm.rank, "struck")
    what = fault["what"]
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "sleep":
        time.sleep(120)
    elif what == "freeze":
        freeze(me.comm)
    elif what == "exception":
        raise ZeroDivisionError("something in the user's code")
    elif what == "one more group":
        me.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    elif what == "frozen parameter":
        dict(me.model.named_parameters())[fault["parameter"]].requires_grad_(False)
    elif what == "older state":
        me.optimizer.load_state_dict(copy.deepcopy(kept))


def freeze(comm: Comm) -> None:
    """Stop all threads, as when a machine hangs; ended from outside after FROZEN seconds."""
    me = os.getpid()
    apart = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": {"PATH": os.environ["PATH"]}}
    subprocess.Popen(["sh", "-c", f"sleep {FROZEN}; kill -KILL {me}"], start_new_session=True, **apart)
    os.kill(me, signal.SIGSTOP)


def kill_while_saving(fault: Fault) -> None:
    """Die with half of the file written, or on rank 0 just before or after the checkpoint appears under its name."""

    def half(state: Any, file: Any) -> None:
        file.write(b"PK" * 500)
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    def replace(source: Any, target: Any) -> None:
        if fault["bit"] % 2:
            os.rename(source, target)
        os.kill(os.getpid(), signal.SIGKILL)

    if fault["rank"] == 0 and fault["byte"] % 2:
        os.replace = replace
    else:
        torch.save = half


def resume(comm: Comm, plan: dict[str, Any], folder: Path) -> None:
    """New processes go on from the checkpoints that were left behind: to the bits of an undisturbed training."""
    expected: dict[str, list[list[tuple[str, str]]]] = {}
    for fault in plan["faults"]:
        recipe, problems = fault["recipe"], []
        if recipe not in expected:
            expected[recipe] = undisturbed([comm], recipe, STEPS)
        team = Team([comm], recipe)
        (me,) = team.ranks
        loaded = dgcopt.checkpoint.load(folder / fault["id"].replace("/", "-"), comm)
        if loaded is None:
            problems.append(("lost state", "no checkpoint was found"))
        else:
            me.put_back(loaded[1])
            early = me.mass()
            for step in range(loaded[0], STEPS):
                if team.digests() != expected[recipe][step]:
                    problems.append(("lost state", f"resumed, not what an undisturbed training has at step {step}"))
                    break
                team.step(step)
            if not problems and team.digests() != expected[recipe][STEPS]:
                problems.append(("lost state", "resumed, not what an undisturbed training has at the end"))
        found = None if loaded is None else loaded[0]
        sums = [early, me.mass()] if loaded is not None and recipe not in BITS_ONLY else []
        record(comm.rank, fault["id"], problems=problems, digest=me.digests()[0], found=found, masses=sums)


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    folder = Path(plan["folder"])
    torch.set_num_threads(1)
    if plan["wire"] == "simulated":
        survivable = Survivable(functools.partial(dgcopt.simulated_world, plan["size"]), plan, folder)
        for fault in plan["faults"]:
            survivable.run(fault)
        return
    together("here")
    comm = dgcopt.init(deadline=plan["deadline"], checksums=plan["checksums"])
    if plan["task"] == "survivable":
        survivable = Survivable(lambda: [comm], plan, folder)
        for fault in plan["faults"]:
            survivable.run(fault)
    else:
        {"ending": end_badly, "resume": resume}[plan["task"]](comm, plan, folder)


if __name__ == "__main__":
    main()
