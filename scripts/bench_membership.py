"""Cost of the membership protocol per failure, in simulated worlds of up to 1,024 ranks.

    python scripts/bench_membership.py
    python scripts/bench_membership.py --sizes 4 1024 --failures 100

Each failure kills ranks at random: one of them, 1% of them, or one and then the rank that collects the announcements,
in the middle of the negotiation. The survivors run `dgcopt.comm.membership.agree` over a simulated store, in which an
operation takes 0.4 to 4 ms there and back, until they have a membership without a dead rank in it. Agents testify to
deaths within 0.1 s, as those of `dgcopt run --survive` do. Prints, as means and maxima over the failures: rounds
(epochs), virtual seconds, and store operations and bytes of the rank that proposes, of each other rank, and of all.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from dgcopt.comm.membership import Epoch, Rules, Status, agree, gone_key

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.simulated_store import Process, Simulation

RULES = Rules(deadline=60.0)
TESTIMONY = 0.1


@dataclass
class Cost:
    """The cost of one failure."""

    rounds: int
    seconds: float
    proposer: tuple[int, int]
    other: tuple[float, float]
    nbytes: int


def fail(size: int, kills: int, amid: bool, rng: random.Random) -> Cost:
    """Kill ranks of a world; return the cost of the membership that follows."""
    names = tuple(f"0.{rank}.0" for rank in range(size))
    epoch = Epoch(0, names, tuple(f"node{rank // 8}:40000" for rank in range(size)), 1000)
    hints = {name: rank for rank, name in enumerate(names)}
    dead = set(rng.sample(names, kills))
    unseen, rounds, seconds = set(dead), 0, 0.0
    spent: dict[str, list[int]] = {name: [0, 0] for name in names}
    while rounds == 0 or dead & set(epoch.members):
        sim = Simulation(rng)
        lives: dict[str, Process] = {}
        where = dict(zip(epoch.members, epoch.where, strict=True))
        for name in epoch.members:
            if name not in dead:
                status = Status(name, hints[name], where[name], 1000)
                lives[name] = sim.start(name, agree(status, epoch, RULES, sim.now))
        for name in unseen:
            sim.after(rng.uniform(0, TESTIMONY), lambda name=name, sim=sim: sim.write(gone_key(name), "killed"))
        for name in dead - unseen:
            sim.data[gone_key(name)] = "killed"
        unseen = set()
        if amid and rounds == 0:
            victim = next(name for name in epoch.members if name not in dead)
            moment = rng.uniform(0, TESTIMONY)
            sim.after(moment, lambda victim=victim, sim=sim, lives=lives: sim.kill(lives[victim]))
            end = moment + rng.uniform(0, TESTIMONY)
            sim.after(end, lambda victim=victim, sim=sim: sim.write(gone_key(victim), "killed"))
            dead.add(victim)
        sim.run(until=1000)
        results = {process.result for name, process in lives.items() if name not in dead}
        (epoch,) = results
        rounds, seconds = rounds + 1, seconds + max(lives[name].time for name in lives if name not in dead)
        for name, process in lives.items():
            spent[name][0] += sum(process.operations.values())
            spent[name][1] += process.nbytes
    left = [spent[name] for name in epoch.members]
    most = max(left)
    others = [one for one in left if one is not most] or [most]
    per_other = mean(one[0] for one in others), mean(one[1] for one in others)
    return Cost(rounds, seconds, (most[0], most[1]), per_other, sum(one[1] for one in spent.values()))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[4, 16, 64, 256, 1024])
    parser.add_argument("--failures", type=int, default=20, help="of each kind and size")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    print("| ranks | lost | rounds, mean (most) | seconds, mean (most) | proposer: operations, KB | "
          "other rank: operations, KB | all: KB |")  # fmt: skip
    print("|---|---|---|---|---|---|---|")
    for size in args.sizes:
        kinds = [("one", 1, False), ("one, then the proposer", 1, True)]
        kinds += [("1%", size // 100, False)] if size >= 200 else []
        for kind, kills, amid in kinds:
            rng = random.Random(f"{args.seed} {size} {kind}")
            costs = [fail(size, kills, amid, rng) for _ in range(args.failures)]
            print(
                f"| {size} | {kind} | {mean(c.rounds for c in costs):.2f} ({max(c.rounds for c in costs)}) "
                f"| {mean(c.seconds for c in costs):.2f} ({max(c.seconds for c in costs):.2f}) "
                f"| {mean(c.proposer[0] for c in costs):,.0f}, {mean(c.proposer[1] for c in costs) / 1000:,.1f} "
                f"| {mean(c.other[0] for c in costs):,.1f}, {mean(c.other[1] for c in costs) / 1000:,.1f} "
                f"| {mean(c.nbytes for c in costs) / 1000:,.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
