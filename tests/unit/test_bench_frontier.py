"""scripts/bench_frontier.py: stacked replicas train as single ones do, sweeps end, processes share the plan."""

import itertools
import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from frontier import plan, stacked_gpt, training

TASK = "random text"


@pytest.fixture
def text(monkeypatch: pytest.MonkeyPatch) -> None:
    text = torch.randint(256, (2000,), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    monkeypatch.setattr(training, "texts", lambda: {"train": text, "validation": text})


def test_stacked_replicas_get_the_clipped_gradients_of_single_ones() -> None:
    models = [training.model_of(seed) for seed in range(3)]
    windows = torch.randint(256, (3, 2, training.TASK["context"] + 1), generator=torch.Generator().manual_seed(1))
    found = stacked_gpt.backward([dict(model.named_parameters()) for model in models], windows, heads=2, clip=0.8)
    losses, norms = [], []
    for model, own in zip(models, windows, strict=True):
        stacked = [param.grad for param in model.parameters()]
        model.zero_grad()
        loss = F.cross_entropy(model(own[:, :-1]).flatten(0, 1), own[:, 1:].flatten())
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.8)))
        for param, grad in zip(model.parameters(), stacked, strict=True):
            torch.testing.assert_close(grad, param.grad, rtol=1e-4, atol=1e-6)
        losses.append(float(loss.detach()))
    assert found == pytest.approx(sum(losses) / 3, rel=1e-6)
    assert min(norms) < 0.8 < max(norms)  # one is clipped, another is not


def test_a_line_that_was_cut_off_is_repeated_and_whole_ones_are_not(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    results = plan.Results(path, TASK)
    first = next(plan.ready(results))
    results.add(first, {"loss": 2.0}, "commit")
    second = next(plan.ready(results))
    results.add(second, {"loss": 1.9}, "commit")
    path.write_bytes(path.read_bytes()[:-20])
    reopened = plan.Results(path, TASK)
    assert reopened.loss(first) == 2.0 and next(plan.ready(reopened)) == second
    reopened.add(second, {"loss": 1.9}, "commit")
    assert [json.loads(line)["loss"] for line in path.read_text().splitlines()] == [2.0, 1.9]


@pytest.mark.parametrize("optimum", [8e-3, 2e-3, 64e-3])
def test_a_sweep_ends_at_a_value_between_two_worse_ones(tmp_path: Path, optimum: float) -> None:
    results = plan.Results(tmp_path / "runs.jsonl", TASK)
    method, rates = plan.METHODS["dense"], []
    while (run := plan.swept(method, results)[1]) is not None:
        rates.append(run.lr)
        diverges = run.lr > 2 * optimum
        loss = None if diverges else max(run.lr / optimum, optimum / run.lr)
        results.add(run, {"loss": loss}, "commit")
    assert plan.best_settings(method, results) == {"lr": optimum}
    assert {optimum / 2, optimum, optimum * 2} <= set(rates) and len(rates) <= 6


@pytest.mark.parametrize("optimum", [(8e-3, 0.5, 0.8), (2e-3, 2.0, 0.0), (16e-3, 1.0, 0.95)])
def test_a_sweep_tunes_the_outer_optimizer_too(tmp_path: Path, optimum: tuple[float, float, float]) -> None:
    results = plan.Results(tmp_path / "runs.jsonl", TASK)
    method, runs = plan.METHODS["DiLoCo, H = 8"], 0
    found = {
        plan.run_of(method, dict(zip(method.grid, point, strict=True)), 4, plan.STEPS // 2, 0, results.task): point
        for point in itertools.product(*(grid.values() for grid in method.grid.values()))
    }
    while (run := plan.swept(method, results)[1]) is not None:
        runs += 1
        loss = sum(abs(math.log((0.1 + a) / (0.1 + b))) for a, b in zip(found[run], optimum, strict=True))
        results.add(run, {"loss": loss}, "commit")
    assert tuple(plan.best_settings(method, results).values()) == optimum
    assert runs < 25  # of hundreds


def test_sweeps_take_turns(tmp_path: Path) -> None:
    results = plan.Results(tmp_path / "runs.jsonl", TASK)
    for _ in plan.METHODS:
        results.add(next(plan.ready(results)), {"loss": 2.0}, "commit")
    assert all(len(plan.swept(method, results)[0]) == 1 for method in plan.METHODS.values())


def test_every_method_can_be_built() -> None:
    for method in plan.METHODS.values():
        settings = {setting: grid[0] for setting, grid in method.grid.items()}
        run = plan.run_of(method, settings, method.ranks[0], 10, 0, TASK)
        replicas = [dict(training.model_of(0).named_parameters()) for _ in range(run.ranks)]
        assert len(training.wrapped(run, replicas)) == run.ranks


def test_a_run_that_another_process_makes_is_left_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    results = plan.Results(tmp_path / "runs.jsonl", TASK)
    first, second = itertools.islice(plan.ready(results), 2)

    def claims_of_another_process() -> list[bool]:
        if (child := os.fork()) == 0:
            told = []
            for run in (first, second):
                with results.claimed(run) as ours:
                    told.append(ours)
            os._exit(2 * told[0] + told[1])
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return [bool(code & 2), bool(code & 1)]

    with results.claimed(first) as ours:
        assert ours
        assert claims_of_another_process() == [False, True]
    assert claims_of_another_process() == [True, True]
    plan.Results(results.path, TASK).add(first, {"loss": 2.0}, "commit")  # by another process
    with results.claimed(first) as ours:
        assert not ours


def test_only_methods_on_the_frontier_get_more_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = plan.Results(tmp_path / "runs.jsonl", TASK)
    names = ("dense", "one rank", "TopK of the update, 1%", "LocalSGD, H = 8", "DiLoCo, H = 8")
    monkeypatch.setattr(plan, "METHODS", {name: plan.METHODS[name] for name in names})
    found = dict(zip(names, [(1.65, 800), (2.1, 0), (1.70, 8), (1.71, 80), (1.72, 80)], strict=True))
    while (run := next(plan.ready(results))).steps < plan.STEPS:
        (name,) = (name for name, method in plan.METHODS.items() if run == plan.swept(method, results)[1])
        loss, sent = found[name]
        results.add(run, {"loss": loss + abs(math.log(run.lr / 8e-3)), "bytes_per_sample": sent}, "commit")
    # LocalSGD's loss is within the margin of TopK's, DiLoCo's is not
    assert plan.survivors(results) == ["dense", "one rank", "TopK of the update, 1%", "LocalSGD, H = 8"]
    of_a_stage = [run for run in plan.ready(results) if run.ranks == 4]
    assert len(of_a_stage) == 3 * 3  # three seeds of each that exchanges


def test_a_sweep_of_its_own_chooses_the_settings_with_eight_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = plan.Results(tmp_path / "runs.jsonl", TASK)
    names = ("dense", "one rank", "dense, Muon")
    monkeypatch.setattr(plan, "METHODS", {name: plan.METHODS[name] for name in names})
    best_with_eight = {4: 8e-3, 8: 16e-3, 1: 8e-3}
    while (run := next(plan.ready(results), None)) is not None:
        loss = 2 + abs(math.log(run.lr / best_with_eight[run.ranks] if run.optimizer == "adamw" else run.lr / 8e-3))
        results.add(run, {"loss": loss, "bytes_per_sample": 0 if run.ranks == 1 else 800}, "commit")
    seeds = {(run["optimizer"], run["ranks"], run["lr"]) for run in made(results) if run["steps"] == plan.STEPS}
    of_four = {("muon", 4, 8e-3), ("muon", 8, 8e-3)}
    assert seeds == {("adamw", 1, 8e-3), ("adamw", 4, 8e-3), ("adamw", 8, 16e-3)} | of_four
    swept = [run["lr"] for run in made(results) if (run["ranks"], run["steps"]) == (8, plan.STEPS // 2)]
    assert swept == [8e-3, 4e-3, 16e-3, 32e-3]


def made(results: plan.Results) -> list[dict[str, Any]]:
    return [entry["run"] for entry in results.runs.values()]


def test_a_run_trains_on_simulated_ranks_and_counts_their_bytes(text: None) -> None:
    method = plan.METHODS["DiLoCo, TopK 1%, unsent local, H = 8"]
    settings = {"lr": 8e-3, "outer_lr": 1.0, "momentum": 0.5}
    result = training.train(plan.run_of(method, settings, 2, 20, 0, TASK))
    assert [step for step, _, _ in result["curve"]] == [*range(2, 21, 2)]
    assert 0 < result["bytes_per_sample"] < result["dense_bytes_per_sample"] / 100
    assert 0 < result["distance"] < 1  # steps are large beside the first weights
    assert result["loss"] < 5.6 and result["loss_of_rank_0"] != result["loss"]  # ranks hold their own unsent part
