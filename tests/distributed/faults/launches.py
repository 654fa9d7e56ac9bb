"""Faults of trainings that real launchers start, and of simulated ranks: many in one launch, or one that ends it.

Ranks are killed, stalled and frozen, disagree, raise, compute NaN and Inf; messages lose bits, checkpoints lose files.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.distributed.faults.rules import Raised, Seen
from tests.distributed.faults.training import PARAMETERS, STEPS, Fault
from tests.support.launching import Outcome, launch, missing

PROGRAM = str(Path(__file__).with_name("launched.py"))
START, DEADLINE, SLACK = 60, 5, 15
"""Seconds that processes may take to start, to wait for each other, and to end when one of them has."""

ODDITIES = (
    *("wrong shape", "wrong dtype", "other ratio", "other compression", "other op", "other buckets", "other passes"),
    *("other optimizer", "fewer parameters", "frozen parameter", "one more group"),
)
FILES = (
    *("truncated part", "flipped part", "missing part", "missing manifest", "truncated manifest", "flipped manifest"),
    "flipped part",
)
ENDINGS = (
    *(("kill", "kill", moment) for moment in ("before backward", "in backward", "before step", "while saving")),
    *(("kill", "kill", "while saving"), ("stall", "sleep", "in backward"), ("stall", "sleep", "before step")),
    *(("stall", "freeze", "before backward"), ("mismatch", "one more group", "before backward")),
    *(("mismatch", "frozen parameter", "after backward"), ("mismatch", "frozen parameter", "before backward")),
    *(("mismatch", "older state", "before backward"), ("exception", "exception", "in backward")),
    *(("exception", "exception", "before step"), ("payload", "received", "on arrival")),
)
NOTES = {
    ("horovod-mpi", "stall"): "no frozen rank: Horovod's MPI controller holds its lock at exit",
    ("simulated", "checkpoint"): "ranks of one process write no checkpoints of their own",
}
QUICK = {"torch": "kill", "horovod-gloo": "payload", "horovod-mpi": "mismatch", "mpi": "stall"}
"""Which ending a small sample takes on each wire: one, as each costs a launch."""


def faults_of(wire: str, size: int, seed: int, quick: bool, not_finite: int, recipes: list[str]) -> list[Fault]:
    """All faults of one wire, each drawn by its name and the seed alone."""
    few = quick or size > 2
    names = [("not-finite", "", "")] * not_finite
    names += [("disagreement", odd, "") for odd in (ODDITIES[:: 4 if few else 1])]
    names += [("payload", where, "") for where in (("sent", "sum") if few else ("sent", "sum", "sent") * 2)]
    if wire != "simulated":
        names += [("checkpoint", file, "") for file in (FILES[::3] if few else FILES)]
        endings = [e for e in ENDINGS if e[1] != "freeze" or wire != "horovod-mpi"]
        if few:
            chosen = [QUICK[wire]] if quick else ["kill", "stall", "mismatch"]
            endings = [[e for e in endings if e[0] == kind][-1 if kind == "mismatch" else 0] for kind in chosen]
        names += endings
    faults, counts = [], Counter[str]()
    for kind, what, moment in names:
        identity = f"{wire}-{size}/{kind}/{counts[kind]}"
        counts[kind] += 1
        rng = random.Random(f"{seed} {identity}")
        fault = {"id": identity, "kind": kind, "what": what, "where": what, "moment": moment, "wire": wire}
        fault |= {"size": size, "recipe": rng.choice(recipes), "rank": rng.randrange(size), "bit": rng.randrange(8)}
        fault |= {"step": rng.choice([3, 5]), "parameter": rng.choice(PARAMETERS), "element": rng.randrange(10**6)}
        fault |= {"value": rng.choice(["nan", "inf", "-inf"]), "then": rng.choice([0, 1, 1, 2]), "which": 0}
        fault |= {"byte": rng.randrange(10**6), "place": 0.1 + 0.8 * rng.random(), "how_many": rng.choice([1, 1, 2])}
        fault["checksums"] = kind == "payload" or (kind == "not-finite" and rng.random() < 0.3)
        if (what, moment) == ("sleep", "before step"):
            fault["step"] -= 1  # or the others would wait in the checkpoint, not for a bucket
        if kind == "not-finite":
            fault["moment"] = rng.choice(["in backward", "in backward", "after backward"])
            fault["everywhere"] = rng.random() < 0.15
        if kind == "payload":
            fault["which"] = rng.randrange(3 if moment else 100)
        if kind == "checkpoint":
            fault["recipe"] = recipes[min(1, len(recipes) - 1)]  # all faults damage copies of one checkpoint
        faults.append(fault)
    return faults


class Campaign:
    """Launches what was planned and judges what came of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seen: dict[str, Seen] = {}
        self.launches = 0

    def of(self, fault: Fault) -> Seen:
        """Everything seen of a fault so far."""
        injected = "ZeroDivisionError" if fault["kind"] == "exception" else ""
        return self.seen.setdefault(fault["id"], Seen(injected=injected))

    def launch(self, task: str, faults: list[Fault], limit: float, folder: Path, deadline: float = 60) -> Outcome:
        folder.mkdir(parents=True, exist_ok=True)
        wire, size = faults[0]["wire"], faults[0]["size"]
        steps = STEPS + sum(fault["then"] for fault in faults)
        plan = {"task": task, "faults": faults, "folder": str(folder), "wire": wire, "size": size, "steps": steps}
        plan |= {"deadline": deadline, "checksums": task == "ending" and faults[0]["checksums"]}
        path = self.folder / f"plan-{self.launches}.json"
        path.write_text(json.dumps(plan))
        self.launches += 1
        return launch(wire, size, [PROGRAM, str(path)], limit=START + limit, bare=wire == "simulated")

    def blame(self, fault: Fault, what: str, words: str, output: str = "") -> None:
        seen = self.of(fault)
        if what == "hang":
            seen.late = seen.late or words
        else:
            told = seen.unsaid if what == "unnoticed" else seen.lost
            if words not in told:
                told.append(words)
        if output:
            print(f"{fault['id']}: {what}: {words}\n{output}", file=sys.stderr)

    def survivable(self, faults: list[Fault]) -> None:
        """Many in one launch; where one ends it after all, the next launch begins behind it."""
        while faults:
            where = self.folder / f"survivable-{self.launches}"
            outcome = self.launch("survivable", faults, 60 + len(faults), where)
            size, done = faults[0]["size"], 0
            for done, fault in enumerate([*faults, None]):  # noqa: B007
                seen = outcome.records.get(fault["id"], {}) if fault else {}
                if fault is None or len(seen) < size:
                    break
                self.judge(fault, seen)
            if done < len(faults):
                self.ended(faults[done], outcome)
            elif outcome.code != 0 or outcome.orphans:
                self.blame(faults[-1], "hang", f"did not end well: {outcome.code}, {outcome.orphans}", outcome.tail)
            faults = faults[done + 1 :]

    def ended(self, fault: Fault, outcome: Outcome) -> None:
        hung = outcome.code is None
        words = "had to be killed" if hung else f"ended the launch with code {outcome.code}"
        self.blame(fault, "hang" if hung else "unnoticed", words, outcome.tail)

    def judge(self, fault: Fault, seen: dict[int, dict[str, Any]]) -> None:
        """What the ranks found by themselves, and what only all of them together show."""
        self.of(fault)
        for rank, record in seen.items():
            for what, words in record["problems"]:
                self.blame(fault, what, f"rank {rank}: {words}")
        if len({record.get("digest") for record in seen.values()}) > 1:
            self.blame(fault, "divergence", f"replicas differ: {[r['digest'] for r in seen.values()]}")
        every = [r["masses"] if "masses" in r else [r["mass"]] if r.get("mass") else [] for r in seen.values()]
        for masses in zip(*every, strict=True):
            gone = [sum(parts) for parts in zip(*(mass["gone"] for mass in masses), strict=True)]
            applied = masses[0]["applied"]
            worst = max(abs(a - b) / max(1.0, abs(a)) for a, b in zip(gone, applied, strict=True))
            if not worst < 1e-4:
                self.blame(fault, "lost state", f"computed - held back and applied differ by {worst:.2g}")

    def ending(self, fault: Fault) -> int | None:
        """A launch that must end badly in time. Returns the checkpoint that must be found, if there is one."""
        folder = self.folder / "left" / fault["id"].replace("/", "-")
        for _ in range(3):
            outcome = self.launch("ending", [fault], DEADLINE + SLACK, folder, DEADLINE)
            end, records = time.time(), outcome.records
            if "struck" in records:
                break
        self.of(fault)
        if "struck" not in records or outcome.code is None:
            self.ended(fault, outcome)
            return None
        late = end - records["struck"][fault["rank"]]["at"] - DEADLINE - SLACK
        # torchrun waits 30 s for a process that does not react to SIGTERM
        if late > (30 if (fault["wire"], fault["what"]) == ("torch", "freeze") else 0) or outcome.orphans:
            self.blame(fault, "hang", f"{late:.1f} s too late, left {len(outcome.orphans)} processes", outcome.tail)
        if outcome.code == 0:
            self.blame(fault, "unnoticed", "ended as if nothing had happened", outcome.tail)
        said = records.get("ended", {})
        for rank, record in said.items():
            if record["touched"]:
                self.blame(fault, "lost state", f"rank {rank}: a step that failed changed parameters or memory")
            if record["names"]:
                self.of(fault).raised.append(Raised(rank, record["names"], record["said"]))
        if words := self.unsaid(fault, said):
            self.blame(fault, "unnoticed", words, outcome.tail)
        for step in range(1, STEPS + 1):
            if len({record["digest"] for record in records.get(f"step {step}", {}).values()}) > 1:
                self.blame(fault, "divergence", f"replicas differ after step {step}")
        return max((record["step"] for record in records.get("saved", {}).values()), default=None)

    def unsaid(self, fault: Fault, said: dict[int, dict[str, Any]]) -> str:
        """What should have been in the errors of this fault and is not."""
        bad, size, kind = fault["rank"], fault["size"], fault["kind"]
        others = [record for rank, record in said.items() if rank != bad]
        if kind == "stall":
            named = [r for r in others if f"{bad}" in r["said"].partition("rank(s) ")[2][:30] and "bucket" in r["said"]]
            if not any("TimeoutExceeded" in record["names"] for record in named):
                return f"no TimeoutExceeded that names rank {bad} and a bucket: {[r['said'] for r in others]}"
        if kind == "mismatch":
            if len(said) < size:
                return f"only ranks {[*said]} said anything"
            if fault["what"] != "older state" and not all("MismatchError" in r["names"] for r in said.values()):
                return f"not every rank raised MismatchError: {[r['said'] for r in said.values()]}"
        if kind == "payload":
            mine, sender = said.get(bad, {"names": [], "said": ""}), f"rank {(bad + 1) % size}"
            known = "have other bits" in mine["said"] or f"from {sender}" in mine["said"]
            if "PayloadError" not in mine["names"] or not known:
                return f"rank {bad} did not blame {sender}: {mine['said']}"
        return ""

    def resume(self, faults: list[Fault], newest: dict[str, int | None]) -> None:
        """New processes go on from what each ending left."""
        wanted = [fault for fault in faults if newest[fault["id"]] is not None]
        if not wanted:
            return
        outcome = self.launch("resume", wanted, 60 + len(wanted), self.folder / "left")
        for fault in wanted:
            seen = outcome.records.get(fault["id"], {})
            if len(seen) < fault["size"]:
                self.blame(fault, "lost state", "could not be resumed", outcome.tail)
                continue
            self.judge(fault, seen)
            step = newest[fault["id"]]
            assert step is not None
            found = {record["found"] for record in seen.values()}
            # a rank that dies last may have finished the checkpoint
            if len(found) > 1 or not found <= ({step, step + 2} if fault["moment"] == "while saving" else {step}):
                self.blame(fault, "lost state", f"found checkpoints {found}, the last one is of step {step}")

    def run(self, faults: list[Fault]) -> None:
        """All faults of one wire and size."""
        endings = [fault for fault in faults if fault["moment"] and fault["kind"] != "not-finite"]
        self.survivable([fault for fault in faults if fault not in endings])
        self.resume(endings, {fault["id"]: self.ending(fault) for fault in endings})


def plan(seed: int, count: int, wires: list[str], recipes: list[str], quick: bool) -> list[Fault]:
    """About `count` faults of all wires, and never fewer than one of each."""
    crews = [(wire, 2) for wire in wires]
    if not quick:
        crews += [(wire, 4) for wire in wires if wire in ("torch", "mpi", "simulated")]
    others = sum(len(faults_of(*crew, seed, quick, 0, recipes)) for crew in crews)
    not_finite = 12 if quick else max(1, -(-(count - others) // len(crews)))
    return [fault for crew in crews for fault in faults_of(*crew, seed, quick, not_finite, recipes)]


def run(faults: list[Fault]) -> Iterator[tuple[Fault, Seen]]:
    """Inject them wire by wire, and say what was seen of each."""
    with tempfile.TemporaryDirectory(prefix="dgcopt-faults-") as folder:
        campaign = Campaign(Path(folder))
        for crew in dict.fromkeys((fault["wire"], fault["size"]) for fault in faults):
            ours = [fault for fault in faults if (fault["wire"], fault["size"]) == crew]
            campaign.run(ours)
            for fault in ours:
                yield fault, campaign.of(fault)


LABELS = {
    "not-finite": "NaN or Inf in a gradient",
    "disagreement": "ranks that disagree when wrapping",
    "payload": "a flipped bit in a message, with checksums",
    "checkpoint": "a truncated, flipped or missing part of a checkpoint",
    "kill": "a rank killed under a launcher",
    "mismatch": "one rank changes parameters or state in training",
    "stall": "a sleeping or frozen rank under a launcher",
    "exception": "an exception in the user's code",
}


def label(fault: Fault) -> str:
    return LABELS[fault["kind"]]


def describe(fault: Fault) -> str:
    return f"{fault['wire']} x{fault['size']}: {fault['what'] or fault['value']} {fault['moment']}, {fault['recipe']}"


def unavailable(fault: Fault) -> str:
    """Why the fault cannot be injected on this machine; empty if it can."""
    return "" if fault["wire"] == "simulated" else missing(fault["wire"])
