"""Every file of configs/compressors and configs/averaging trains every task that needs no download."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import sysconfig
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import dgcopt

pytest.importorskip("jsonargparse")
pytest.importorskip("sklearn")

CONFIGS = Path(__file__).parents[1] / "configs"
METHODS = sorted([*CONFIGS.glob("compressors/*.yaml"), *CONFIGS.glob("averaging/*.yaml")])
STEPS = 96
"""Whole rounds of all averaging algorithms: 12 of 8 steps, 3 of 32, 2 of 48."""

LATE = {"dgc", "dgc_compact", "diloco_dgc", "hierarchical", "per_parameter", "randomk", "signsgd"}
"""Those that hold back the most or take the smallest steps: they take twice as many, as does what they come near."""

EMAIL = Path(sysconfig.get_path("stdlib")) / "email"
TEXT = {"context": 32, "max_bytes": 100_000, "root": str(EMAIL)}
SMALL = {
    "digits": {"model.init_args.width": 8, "batch_size": 16, "warmup_epochs": 1.5},
    "stdlib_gpt": {
        "model.init_args": {"layers": 1, "heads": 2, "width": 32, "context": 32},
        **{f"train_data.init_args.{name}": value for name, value in TEXT.items()},
        **{f"test_data.init_args.{name}": value for name, value in TEXT.items()},
        "batch_size": 8,
    },
}
"""A network of a fifteenth of the parameters; a GPT on one package of the standard library."""

SHARE = 0.5
"""Of what dense training takes off the loss in as many steps."""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(CONFIGS.parent))
    monkeypatch.setattr(dgcopt, "broadcast_parameters", lambda *_, **__: None)  # simulated ranks cannot; seeds do
    return importlib.import_module("train")


def trainers(script: ModuleType, task: str, method: Path, seed: int, ranks: int) -> list[Any]:
    """What `train.py --config task --config method` makes on each rank."""
    small = [f"--{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in SMALL[task].items()]
    files = ["--config", str(CONFIGS / f"tasks/{task}.yaml"), "--config", str(method)]
    made, parser = [], script.make_parser()
    config = parser.parse_args([*files, *small, f"--seed={seed}"])
    for comm in dgcopt.simulated_world(ranks):
        torch.manual_seed(seed)
        objects = parser.instantiate(config)
        settings = script.Settings(**{field.name: objects[field.name] for field in dataclasses.fields(script.Settings)})
        made.append(script.Trainer(settings, comm))
        made[-1].fit_workers()
    return made


def train(
    script: ModuleType, task: str, method: Path, steps: int = 2 * STEPS, seed: int = 0, ranks: int = 2
) -> tuple[float, float]:
    """The test loss of the first rank's weights before training and after it."""
    made = trainers(script, task, method, seed, ranks)
    first = made[0]
    data, size = first.settings.train_data, first.settings.batch_size
    inputs, targets = (torch.stack(part) for part in zip(*data, strict=True))
    held_out = [torch.stack(part) for part in zip(*islice(first.settings.test_data, 256), strict=True)]

    def loss() -> float:
        with torch.no_grad():
            return float(script.cross_entropy(first.model(held_out[0]), held_out[1]))

    before = loss()
    while first.state.step < steps:
        order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(seed + first.state.epoch))
        for batch in order[: first.steps_per_epoch * size * ranks].view(-1, ranks, size):
            for mine, chosen in zip(made, batch, strict=True):
                script.cross_entropy(mine.model(inputs[chosen]), targets[chosen]).backward()
            with ExitStack() as rates:  # on the simulated wire one rank's step takes part for all
                for mine in made:
                    rates.enter_context(mine.lr_of_step())
                for mine in made:
                    mine.optimizer.step()
            for mine in made:
                mine.count_step()
            if first.state.step == steps:
                break
        for mine in made:
            mine.scheduler.step()
            mine.state.epoch, mine.state.seen = mine.state.epoch + 1, 0
    return before, loss()


@functools.cache
def dense(script: ModuleType, task: str, steps: int) -> float:
    """How far the loss falls uncompressed."""
    before, after = train(script, task, CONFIGS / "compressors/none.yaml", steps)
    return before - after


@pytest.mark.parametrize("task", SMALL)
@pytest.mark.parametrize("method", [m for m in METHODS if m.stem != "async"], ids=lambda method: method.stem)
def test_it_learns(script: ModuleType, task: str, method: Path) -> None:
    steps = STEPS * (1 + (method.stem in LATE))
    before, after = train(script, task, method, steps)
    print(f"{task} with {method.stem}: {before:.3f} -> {after:.3f}")
    assert before - after > SHARE * dense(script, task, steps)


def test_training_beside_a_thread_is_not_for_simulated_ranks(script: ModuleType) -> None:
    """Which is why async.yaml is not among those above; test_async_average.py trains with real processes."""
    with pytest.raises(dgcopt.ConfigError, match="background thread, and simulated ranks take turns"):
        train(script, "digits", CONFIGS / "averaging/async.yaml")


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_chunks_are_fine_enough_for_a_small_network(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Four workers, at four times the learning rate of one: with one chunk in five on its way it did not learn."""
    monkeypatch.setitem(SMALL["digits"], "model.init_args.width", 32)
    before, after = train(script, "digits", CONFIGS / "compressors/csc.yaml", seed=seed, ranks=4)
    assert after < 0.5 * before
