"""Inject faults into real and simulated trainings, and classify how each ends by one table of rules.

    python scripts/inject_faults.py                                    # more than 1,000 faults: over an hour on 2 cores
    python scripts/inject_faults.py --quick                            # a small sample
    python scripts/inject_faults.py --kinds disks networks             # some kinds
    python scripts/inject_faults.py --results run.jsonl --limit 600    # go on where the last call stopped
    python scripts/inject_faults.py --only disks/17 --seed 3           # one fault again

A fault is handled if the run ends in time with an error of dgcopt that names a place, or goes on to the bits of an
undisturbed training; an exception that is injected may reach the caller as it is, with the state before or after the
step. The rules are in tests/distributed/faults/rules.py, and each kind of fault is a module beside it. Exit code 1 if a
fault is not handled.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.distributed.faults import (  # noqa: E402
    broadcasts,
    disks,
    elastic,
    exceptions,
    launches,
    messages,
    networks,
    processes,
    sharded,
)
from tests.distributed.faults.rules import Outcome, Seen, classify  # noqa: E402
from tests.distributed.faults.training import RECIPES  # noqa: E402
from tests.support.launching import WIRES  # noqa: E402

SINGLE: dict[str, Any] = {
    module.__name__.rpartition(".")[2]: module
    for module in (exceptions, messages, broadcasts, disks, processes, networks, elastic, sharded)
}
"""Kinds with a fixed number of faults."""

KINDS: dict[str, Any] = {**SINGLE, "launches": launches}
Fault = dict[str, Any]


def planned(kind: str, arguments: argparse.Namespace) -> list[Fault]:
    """The faults of one kind, each drawn by its number and the seed alone."""
    if kind == "launches":
        wires, recipes = arguments.wires, arguments.recipes
        return launches.plan(arguments.seed, arguments.launches, wires, recipes, arguments.quick)
    module = SINGLE[kind]
    count = module.QUICK if arguments.quick else module.COUNT
    return [{"id": f"{kind}/{n}", **fault} for n, fault in enumerate(module.plan(arguments.seed, count))]


def injected(kind: str, faults: list[Fault]) -> Iterator[tuple[Fault, Seen]]:
    if hasattr(KINDS[kind], "run"):  # several in a launch
        yield from KINDS[kind].run(faults)
        return
    for fault in faults:
        yield fault, SINGLE[kind].inject(fault)


def result_of(kind: str, fault: Fault, seed: int, outcome: str, words: str) -> dict[str, Any]:
    what, group = KINDS[kind].describe(fault), KINDS[kind].label(fault)
    return {"id": fault["id"], "seed": seed, "kind": group, "what": what, "outcome": outcome, "words": words}


def table(results: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
    """A row for every kind of fault, and one for all."""
    rows = []
    for kind in [*dict.fromkeys(result["kind"] for result in results), "all"]:
        ours = [result for result in results if kind in (result["kind"], "all")]
        counts = Counter(result["outcome"] for result in ours)
        row: dict[str, Any] = {"fault": kind, "injected": len(ours) - counts["skipped"]}
        rows.append(row | {outcome.value: counts[outcome.value] for outcome in Outcome})
    lines = [[*rows[0]], *([str(value) for value in row.values()] for row in rows)]
    widths = [max(len(line[place]) for line in lines) for place in range(len(lines[0]))]
    text = "\n".join(" | ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
    skipped = dict.fromkeys(f"{r['kind']}: {r['words']}" for r in results if r["outcome"] == "skipped")
    return text + "".join(f"\nskipped: {what}" for what in skipped), rows


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=[*KINDS], default=[*KINDS], help="which faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a small sample, with 2 ranks")
    parser.add_argument("--only", help="the name of one fault")
    parser.add_argument("--results", type=Path, help="a file of results: faults that it has are not repeated")
    parser.add_argument("--limit", type=float, default=float("inf"), help="begin no fault after that many seconds")
    parser.add_argument("--launches", type=int, default=300, help="about how many of that kind")
    parser.add_argument("--wires", nargs="+", choices=(*WIRES, "simulated"), default=[*WIRES, "simulated"])
    parser.add_argument("--recipes", nargs="+", choices=[*RECIPES], default=[*RECIPES], help="how launches train")
    parser.add_argument("--json", type=Path, help="write the table and every result to this file")
    arguments = parser.parse_args(words)

    results: list[dict[str, Any]] = []
    if arguments.results and arguments.results.exists():
        results = [json.loads(line) for line in arguments.results.read_text().splitlines()]
    done = {result["id"] for result in results if result["seed"] == arguments.seed}
    start = time.monotonic()

    def keep(result: dict[str, Any]) -> None:
        results.append(result)
        if result["outcome"] not in ("handled", "skipped"):
            again = f"python scripts/inject_faults.py --seed {arguments.seed} --only {result['id']}"
            print(f"{result['outcome']}: {result['what']}\n  {result['words']}\n  again: {again}", flush=True)
        if arguments.results:
            with arguments.results.open("a") as file:
                file.write(json.dumps(result) + "\n")

    for kind in arguments.kinds:
        faults = planned(kind, arguments)
        if arguments.only:
            faults = [fault for fault in faults if fault["id"] == arguments.only]
        faults = [fault for fault in faults if fault["id"] not in done]
        possible = []
        for fault in faults:
            why = KINDS[kind].unavailable(fault) if hasattr(KINDS[kind], "unavailable") else ""
            if why:
                keep(result_of(kind, fault, arguments.seed, "skipped", why))
            else:
                possible.append(fault)
        if time.monotonic() - start > arguments.limit:
            break
        for fault, seen in injected(kind, possible):
            outcome, told = classify(seen)
            keep(result_of(kind, fault, arguments.seed, outcome.value, told))
            if time.monotonic() - start > arguments.limit:
                break
        if faults:
            print(f"{kind}: {len(faults)} faults, {time.monotonic() - start:.0f} s", file=sys.stderr)
    if not results:
        parser.error("no such fault")
    text, rows = table(results)
    print(f"\nseed {arguments.seed}, {time.monotonic() - start:.0f} s\n\n{text}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"seed": arguments.seed, "table": rows, "faults": results}, indent=1))
    return int(any(result["outcome"] not in ("handled", "skipped") for result in results))


if __name__ == "__main__":
    sys.exit(main())
