"""train.py from the outside: every launcher, exact resumption, other numbers of workers, averaging."""

import dataclasses
import importlib
import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dgcopt.comm import LocalComm
from tests.support.train_script import (
    DGC,
    SMALL,
    execute,
    history,
    launch,
    refusal,
    train,
)

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("standing_workers")]


# What a checkpoint has to get right beyond digits: dropout and augmentation draw random numbers, batch normalisation
# has statistics that differ from rank to rank.
NOISY = """
import torch
from torch import nn
from dgcopt.tasks.digits import Digits


class NoisyDigits(Digits):
    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return image + 0.1 * torch.randn(image.shape), label


class NoisyNet(nn.Sequential):
    def __init__(self):
        hidden = [nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout()]
        super().__init__(nn.Flatten(), *hidden, nn.Linear(32, 10))
"""


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One process with the batches of two: dense data parallelism must equal it."""
    output = tmp_path_factory.mktemp("reference")
    return train(1, output, *SMALL, "--scale_lr", "false", "--batch_size", "64")


class TestLaunchers:
    @pytest.mark.parametrize("launcher", ["torchrun", "mpirun", "horovodrun"])
    def test_two_workers_equal_one_with_their_batches(
        self, launcher: str, reference: dict[str, Any], tmp_path: Path
    ) -> None:
        result = train(launch(2, launcher), tmp_path, *SMALL, "--scale_lr", "false")
        assert result["workers"] == 2 and reference["workers"] == 1
        assert result["wire"] == {"torchrun": "torch", "mpirun": "mpi", "horovodrun": "horovod"}[launcher]
        assert result["steps"] == reference["steps"] == 22
        assert result["test_loss"] == pytest.approx(reference["test_loss"], rel=1e-5)
        # 359 test samples over two ranks, none of them twice
        assert result["accuracy"] * 359 == pytest.approx(round(result["accuracy"] * 359), abs=1e-9)
        assert 1 <= 1 / result["ratio_fp32"] < 1.05 and result["sent_bytes"] > 0

    def test_accumulated_batches_equal_large_ones(self, reference: dict[str, Any], tmp_path: Path) -> None:
        accumulated = ["--scale_lr", "false", "--batches_per_step", "2"]
        result = train(1, tmp_path, *SMALL, *accumulated)
        assert result["steps"] == 22
        assert result["test_loss"] == pytest.approx(reference["test_loss"], rel=1e-5)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    path = tmp_path_factory.mktemp("task")
    (path / "noisy.py").write_text(NOISY)
    settings = [*SMALL, *DGC, "--model", "noisy.NoisyNet", "--train_data", "noisy.NoisyDigits"]
    settings += ["--train_data.split", "train", "--checkpoint_steps", "4"]
    settings += ["--scheduler_interval", "step", "--scheduler.T_max", "60"]
    settings += ["--compressor.warmup.ratios", "[0.1]", "--compressor.ratio", "0.05"]
    return lambda output, *more, workers=2: train(workers, output, *settings, *more, path=path)


@pytest.fixture(scope="module")
def straight(task: Callable[..., dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("straight")
    task(output, "--epochs", "2")
    return output


def same(result: dict[str, Any], straight: Path) -> bool:
    """Whether two runs ended in the same bits."""
    expected = json.loads((straight / "result.json").read_text())
    return all(result[key] == expected[key] for key in ("parameters_sha256", "test_loss", "accuracy", "steps"))


class TestExactResumption:
    """Two workers with DGC, dropout, augmentation and batch normalisation."""

    def test_after_an_epoch(self, task: Callable[..., dict[str, Any]], straight: Path, tmp_path: Path) -> None:
        halfway = task(tmp_path, "--epochs", "1")
        assert not same(halfway, straight)
        assert same(task(tmp_path, "--epochs", "2", "--resume"), straight)

    def test_a_finished_run_keeps_its_result(
        self, task: Callable[..., dict[str, Any]], straight: Path, tmp_path: Path
    ) -> None:
        """Its traffic is that of its steps, and its trace too."""
        shutil.copytree(straight, tmp_path, dirs_exist_ok=True)
        kept = (straight / "result.json").read_text()
        assert json.loads(kept)["sent_bytes"] > 0
        (tmp_path / "trace-0.json").write_text("of its first steps")
        task(tmp_path, "--epochs", "2", "--resume", "--trace_steps", "2")
        assert (tmp_path / "result.json").read_text() == kept
        assert (tmp_path / "trace-0.json").read_text() == "of its first steps"
        (tmp_path / "result.json").write_text("{")  # the run was killed before it was complete
        assert same(task(tmp_path, "--epochs", "2", "--resume"), straight)

    def test_within_an_epoch(self, task: Callable[..., dict[str, Any]], straight: Path, tmp_path: Path) -> None:
        shutil.copytree(straight, tmp_path, dirs_exist_ok=True)
        checkpoints = sorted((tmp_path / "checkpoints").glob("step-*"))
        assert [path.name for path in checkpoints] == ["step-00000040", "step-00000044"]
        shutil.rmtree(checkpoints[-1])
        (tmp_path / "result.json").unlink()
        with (tmp_path / "history.jsonl").open("a") as file:
            file.write('{"step": 44, "lo')  # where the machine went down
        assert same(task(tmp_path, "--epochs", "2", "--resume"), straight)
        # The steps that were taken again are recorded once.
        assert [entry["step"] for entry in history(tmp_path)] == [entry["step"] for entry in history(straight)]

    def test_ranks_hold_the_same_model(self, straight: Path) -> None:
        files = sorted(straight.glob("checkpoints/step-00000044/rank-*.pt"))
        first, second = (torch.load(file, weights_only=True) for file in files)
        assert all(torch.equal(first["model"][name], second["model"][name]) for name in first["model"])
        assert not torch.equal(first["parts"]["random"]["cpu"], second["parts"]["random"]["cpu"])

    def test_loader_processes_change_nothing(
        self, task: Callable[..., dict[str, Any]], straight: Path, tmp_path: Path
    ) -> None:
        assert same(task(tmp_path, "--epochs", "2", "--loader_workers", "1"), straight)

    def test_evaluate(self, task: Callable[..., dict[str, Any]], straight: Path) -> None:
        result = json.loads((straight / "result.json").read_text())
        evaluation = task(straight, "--evaluate")
        assert evaluation == {key: result[key] for key in ("accuracy", "test_loss")}
        assert 0.2 < evaluation["accuracy"] < 1

    def test_evaluate_with_other_workers(self, task: Callable[..., dict[str, Any]], straight: Path) -> None:
        """The model is measured as it was: the residual is not in it yet."""
        result = json.loads((straight / "result.json").read_text())
        evaluation = task(straight, "--evaluate", workers=1)
        assert evaluation["accuracy"] == result["accuracy"]
        assert evaluation["test_loss"] == pytest.approx(result["test_loss"], rel=1e-5)

    def test_a_fresh_run_does_not_mix_with_an_old_one(self, straight: Path) -> None:
        assert "--resume" in refusal(*SMALL, "--output", str(straight))


class TestPlaces:
    """Where a run goes that was not told where: the README's launch lines work one after another."""

    def test_a_default_output_is_numbered_and_resumed_where_it_is_newest(self, tmp_path: Path) -> None:
        first, second = tmp_path / "run.1", tmp_path / "run.1-2"
        (tmp_path / "own.yaml").write_text(f"output: {first}\n")
        settings = [*SMALL, "--config", str(tmp_path / "own.yaml")]
        for output, more, told in (
            (first, [], ""),
            (second, [], f"{first} exists: this run goes to {second}"),
            (second, ["--resume", "--epochs", "2"], f"{second} is the newest"),
        ):
            done = execute(2, *settings, *more)
            assert done.returncode == 0, done.stderr[-3000:]
            assert f": {output}/result.json" in done.stdout and done.stdout.count(told or "exists") == bool(told)
        steps = [json.loads((output / "result.json").read_text())["steps"] for output in (first, second)]
        assert steps == [22, 44] and not (tmp_path / "run.1-3").exists()

    def test_numbers(self, parser: Any, tmp_path: Path) -> None:
        """Rank 0 decides, by what there is: a number is not used twice, whatever was removed in between."""
        choose = importlib.import_module("train").choose_output
        base = tmp_path / "deep" / "run"
        assert choose(base, True, LocalComm()) == choose(base, False, LocalComm()) == base
        for name, fresh, newest in (
            ("run", "run-2", "run"),
            ("run-4", "run-5", "run-4"),
            ("run-11", "run-12", "run-11"),
        ):
            (base.parent / name).mkdir(exist_ok=name == "run")  # taken above
            (base.parent / "run-away").mkdir(exist_ok=True)
            (base.parent / "runs-30").mkdir(exist_ok=True)
            assert choose(base, False, LocalComm()).name == newest and choose(base, True, LocalComm()).name == fresh
            (base.parent / fresh).rmdir()
        base.rmdir()
        assert choose(base, True, LocalComm()).name == "run-12"
        assert choose(Path("."), True, LocalComm()) == Path(".")

    def test_runs_that_start_together_take_a_number_each(
        self, parser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As in a job array: all have looked at the folder before one of them makes its own."""
        choose = importlib.import_module("train").choose_output
        monkeypatch.setattr(Path, "glob", lambda path, pattern: iter(()))
        names = {choose(tmp_path / "run", True, LocalComm()).name for _ in range(3)}
        assert names == {"run", "run-2", "run-3"}
        assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run-2", "run-3"]

    def test_a_refused_run_leaves_no_folder(self, tmp_path: Path) -> None:
        """A later --resume would take it for the newest run."""
        (tmp_path / "own.yaml").write_text(f"output: {tmp_path / 'run'}\n")
        settings = [*SMALL, "--config", str(tmp_path / "own.yaml")]
        assert "lower batch_size" in refusal(*settings, "--batch_size", "2000")
        assert not (tmp_path / "run").exists()
        (tmp_path / "blocked").write_text("")
        (tmp_path / "own.yaml").write_text(f"output: {tmp_path / 'blocked/run'}\n")
        assert "or choose another --output" in refusal(*settings)


class TestAveraging:
    """Weights in place of gradients, chosen by a config file."""

    SETTINGS = (*SMALL, "--config", "configs/averaging/diloco_dgc.yaml", "--averaging.every", "4")

    def test_within_a_window_a_run_goes_on_bit_identically(self, tmp_path: Path) -> None:
        settings = [*self.SETTINGS, "--checkpoint_steps", "9"]
        result = train(2, tmp_path, *settings)
        sent = [entry["sent_bytes"] for entry in history(tmp_path) if "loss" in entry]
        assert [step for step, bytes_ in enumerate(sent, start=1) if bytes_] == [1, 4, 8, 12, 16, 20]
        files = sorted(tmp_path.glob("checkpoints/step-00000022/rank-*.pt"))
        first, second = (torch.load(file, weights_only=True)["model"] for file in files)
        weights = [name for name in first if "running" not in name and "num_batches" not in name]
        assert all(torch.equal(first[name], second[name]) for name in weights), "the outcome is one model"
        shutil.rmtree(tmp_path / "checkpoints/step-00000022")
        (tmp_path / "result.json").unlink()
        again = train(2, tmp_path, *settings, "--resume")
        assert all(again[key] == result[key] for key in ("parameters_sha256", "test_loss", "accuracy", "steps"))
        assert train(2, tmp_path, *settings, "--evaluate")["test_loss"] == result["test_loss"]

    def test_more_workers_go_on_from_the_mean(self, tmp_path: Path) -> None:
        settings = [*self.SETTINGS, "--checkpoint_steps", "9"]
        train(2, tmp_path, *settings)
        shutil.rmtree(tmp_path / "checkpoints/step-00000022")
        result = train(4, tmp_path, *settings, "--resume", "--epochs", "2")
        assert result["workers"] == 4 and result["steps"] == 18 + 2 + 11

    def test_a_compressor_beside_it_is_refused(self) -> None:
        line = refusal(*self.SETTINGS, *DGC)
        assert "compressor is for gradients" in line

    @pytest.mark.parametrize(
        "setting",
        [
            *(("--clip_norm", "1.0"), ("--op", "sum"), ("--bucket_mb", "3"), ("--first_bucket_mb", "3")),
            *(("--check_replicas_every", "3"), ("--trace_steps", "3")),
        ],
        ids=" ".join,
    )
    def test_settings_of_averaged_gradients_are_refused(self, setting: tuple[str, str]) -> None:
        assert f"for averaged gradients only: {setting[0][2:]}." in refusal(*self.SETTINGS, *setting)


# Says which samples were drawn: each worker adds a line per sample to a file of its own.
COUNTED = """
import os
from dgcopt.tasks.digits import Digits


class CountedDigits(Digits):
    def __getitem__(self, index):
        with open(os.path.join(os.path.dirname(__file__), f"drawn-{os.getpid()}"), "a") as file:
            file.write(f"{index}\\n")
        return super().__getitem__(index)
"""


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A folder with what two workers have done in 18 of 22 steps, and their settings."""
    path = tmp_path_factory.mktemp("begun")
    (path / "counted.py").write_text(COUNTED)
    settings = [*SMALL, *DGC, "--train_data", "counted.CountedDigits", "--train_data.split", "train"]
    settings += ["--checkpoint_steps", "6", "--warmup_epochs", "1", "--optimizer.lr", "0.03"]
    settings += ["--optimizer.nesterov", "false", "--optimizer.weight_decay", "0"]
    settings += ["--scheduler", "torch.optim.lr_scheduler.StepLR", "--scheduler.step_size", "100"]
    settings += ["--compressor.warmup.ratios", "[0.5, 0.25]", "--compressor.ratio", "0.1"]
    train(2, path / "run", *settings, path=path)
    shutil.rmtree(path / "run/checkpoints/step-00000022")
    for file in path.glob("drawn-*"):
        file.unlink()
    return path, settings


class TestOtherWorkers:
    """A run that goes on with more or fewer workers than it was begun with."""

    def test_nothing_held_back_is_lost(
        self, begun: tuple[Path, list[str]], parser: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A single worker goes on with what both held back, and their momentum, at its own lr."""
        path, settings = begun
        monkeypatch.syspath_prepend(path)
        module = importlib.import_module("train")
        objects = parser.instantiate(parser.parse_args([*settings, "--output", str(path / "run")]))
        fields = [field.name for field in dataclasses.fields(module.Settings)]
        trainer = module.Trainer(module.Settings(**{name: objects[name] for name in fields}), LocalComm())
        assert trainer.state.sync() and trainer.state.step == 18
        states = [torch.load(path / f"run/checkpoints/step-00000018/rank-{rank}.pt") for rank in range(2)]
        assert all(state["values"]["seen"] == 18 * 64 for state in states)
        assert all(state["optimizer"]["param_groups"][0]["lr"] == 0.03 for state in states)
        before = [state["optimizer"]["dgcopt"]["memory"] for state in states]
        memory = trainer.optimizer.state_dict()["dgcopt"]["memory"]
        assert memory["residual"] and memory.keys() == before[0].keys()
        for kind, by_name in memory.items():
            for name, tensor in by_name.items():
                torch.testing.assert_close(tensor, before[0][kind][name] + before[1][kind][name])

    @pytest.mark.parametrize("workers", [1, 4])
    def test_resume(self, workers: int, begun: tuple[Path, list[str]], tmp_path: Path) -> None:
        """No sample is seen twice or left out, lr and ratio follow, and the run goes on learning."""
        path, settings = begun
        shutil.copytree(path, tmp_path, dirs_exist_ok=True)
        output = tmp_path / "run"
        done = execute(workers, *settings, "--epochs", "2", "--resume", "--output", str(output), path=tmp_path)
        assert done.returncode == 0, done.stderr[-3000:]
        assert f"step 18 was saved by 2 worker(s), and now there are {workers}" in done.stdout
        per_step, left = 32 * workers, 1438 - 18 * 64
        steps = [entry for entry in history(output) if "loss" in entry]
        first, whole = left // per_step, 1438 // per_step
        assert [entry["step"] for entry in steps] == list(range(1, 18 + first + whole + 1))
        assert steps[-1]["epoch"] == 2 and steps[17 + first]["epoch"] <= 1 < steps[18 + first]["epoch"]

        drawn = sorted(int(line) for path in tmp_path.glob("drawn-*") for line in path.read_text().split())
        counts = [drawn.count(index) for index in range(1438)]
        order = torch.randperm(1438, generator=torch.Generator().manual_seed(0))
        again = torch.randperm(1438, generator=torch.Generator().manual_seed(1))
        expected = torch.zeros(1438, dtype=torch.int64)
        expected[order[18 * 64 : 18 * 64 + first * per_step]] += 1
        expected[again[: whole * per_step]] += 1
        assert counts == expected.tolist()

        # lr has been warmed up by 18 of 22 steps, and goes on from there to the new number of workers'
        at = min(1.0, 18 * 64 / (whole * per_step))
        assert steps[17]["lr"] == pytest.approx(0.03 * (1 + 17 / 22))
        assert steps[18]["lr"] == pytest.approx(0.03 * (1 + (workers - 1) * at))
        assert steps[-1]["lr"] == pytest.approx(0.03 * workers)
        assert steps[-1]["loss"] < steps[0]["loss"]
        if workers > 1:  # a single worker sends nothing
            sent = [entry["payload_bytes"] for entry in steps]
            assert sent[16] == pytest.approx(sent[18], rel=0.02)
            assert sent[18 + first] == pytest.approx(sent[17 + first] / 2, rel=0.1)
