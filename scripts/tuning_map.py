"""Writes the map of docs/tuning.md: where compression pays, for five models over ranks, bandwidth and latency.

    python scripts/tuning_map.py                                 # records all costs: half an hour on one core
    python scripts/tuning_map.py --costs docs/tuning_costs.json --memory 14.05e9  # predicts again: a minute

Writes docs/tuning_map.csv, a row for each cell with the exchange to use, its gain over the best dense one, the gain of
dgcopt's fastest exchange, which is below 1 where it loses, and the seconds of every exchange; docs/tuning_map.png; and
docs/tuning_costs.json, the recorded costs. Prints how many cells each exchange wins by model.

Costs are the CPU seconds of one core here, divided by the memory bandwidth of the device over that of the core; for
every 100 MB of gradients a compressor's launches add a millisecond (a hundred of 10 us: an assumption, not measured).
Collectives take the faster of ring and tree.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

from dgcopt.tuning.advise import ACCURACY, BASELINES, CANDIDATES, Setting, predict, recipes_of, recommend
from dgcopt.tuning.commands import choice_of, memory_speed
from dgcopt.tuning.costs import Recipe, load_recipes, save_recipes
from dgcopt.tuning.models import Model, known_models
from dgcopt.tuning.plot import RANKS, RATES, plot_regions
from dgcopt.tuning.wire import Network

DOCS = Path(__file__).resolve().parent.parent / "docs"
MODELS = ("resnet50", "vgg16", "bert_base", "gpt2_small", "vit_s")
LATENCIES = (50e-6, 1e-3, 5e-3)
NAMES = (
    *("NoCompression()", "BF16()", "ByteGrad()", "PowerSGD(rank=4, start_step=0)", "DGC(ratio=0.01, warmup=None)"),
    *('DGC(ratio=0.01, warmup=None, reduce="owner")', "DGC.compact(warmup=None)"),
    'DGC.compact(warmup=None, reduce="owner")',
)


LAUNCHES = 1e-3
"""Seconds of a compressor's launches on a GPU for a bucket of 100 MB."""


def launched(recipe: Recipe, model: Model, speed: float) -> Recipe:
    """Return a recipe with the launches of a GPU that is `speed` times as fast as the core on which it was recorded."""
    if recipe.name in (*BASELINES, "NoCompression()", "BF16()"):
        return recipe
    more = LAUNCHES * max(1.0, 4e-8 * model.numel) * speed
    low, high = (replace(one, encode=one.encode + more) for one in (recipe.low, recipe.high))
    return replace(recipe, low=low, high=high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--costs", type=Path, help="file of recorded costs, in place of recording")
    parser.add_argument("--memory", type=float, help="memory of the core that recorded, in bytes per second")
    parser.add_argument("--record", nargs="+", default=MODELS, choices=MODELS, help="record these and add them")
    parser.add_argument("--docs", type=Path, default=DOCS, help="folder to write to")
    arguments = parser.parse_args()
    costs = arguments.docs / "tuning_costs.json"
    if arguments.costs is None:
        known = load_recipes(costs) if costs.exists() else {}
        for name in arguments.record:
            note = lambda candidate, name=name: print(time.strftime("%X"), name, candidate, file=sys.stderr, flush=True)  # noqa: E731
            shapes = known_models()[name].shapes
            known[name] = recipes_of(shapes, NAMES, (2, 4), clock=time.process_time, steps=1, before=note)
            save_recipes(known, costs)
    write(arguments.costs or costs, arguments.memory, arguments.docs)


def write(costs: Path, memory: float | None, docs: Path) -> None:
    """Write the table and the figure, and print sums of them."""
    import torch

    recorded, models = load_recipes(costs), known_models()
    own = memory_speed(torch.device("cpu"), clock=time.process_time) if memory is None else memory
    panels, wins, rows = [], Counter(), []
    for name in MODELS:
        model = models[name]
        for latency in LATENCIES:
            speed = model.memory / own
            recipes = [launched(recipe, model, speed) for recipe in recorded[name]]
            base = Setting(model, RANKS[0], Network(latency, RATES[0], algorithm="tree"), speed=speed)
            panels.append((f"{name}, {1e3 * latency:g} ms", choice_of(base, recipes, ACCURACY)))
            for size in RANKS:
                for bandwidth in RATES:
                    there = Setting(model, size, Network(latency, bandwidth, algorithm="tree"), speed=speed)
                    found = predict(there, recipes, limits=False)
                    best, _ = recommend(found)
                    dense = min(one.seconds for one in found if one.name in BASELINES)
                    rounded, _ = recommend(found, ["exact", "rounded"])
                    wins[name, best.name] += 1
                    other = next(one for one in found if one.name not in BASELINES)
                    seconds = {one.name: f"{one.seconds:.6g}" for one in found}
                    rows.append(
                        {"model": name, "ranks": size, "gbit": 8e-9 * bandwidth, "latency_ms": 1e3 * latency}
                        | {"use": best.name, "gain": f"{dense / best.seconds:.3f}", "use_if_not_delayed": rounded.name}
                        | {"fastest_of_dgcopt": other.name, "its_gain": f"{dense / other.seconds:.3f}"}
                        | {each: seconds[each] for each in (*BASELINES, *NAMES)}
                    )
    with (docs / "tuning_map.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    plot_regions(panels, [*BASELINES, *CANDIDATES], len(LATENCIES), docs / "tuning_map.png")
    cells = len(RANKS) * len(RATES) * len(LATENCIES)
    print(f"{len(rows)} cells, {cells} of each model; memory of this core {own / 1e9:.3g} GB/s")
    print(json.dumps({f"{model}: {name}": count for (model, name), count in sorted(wins.items())}, indent=1))


if __name__ == "__main__":
    main()
