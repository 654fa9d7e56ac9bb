"""train.py from the outside: every launcher, refusals in one line, exact resumption."""

import dataclasses
import importlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dgcopt
from dgcopt.comm import LocalComm
from dgcopt.tuning.report import read_run, read_trace

pytest.importorskip("jsonargparse")
pytest.importorskip("sklearn")
pytestmark = [pytest.mark.processes]

REPOSITORY = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
SMALL = ["--config", "configs/tasks/digits.yaml", "--model.width", "8", "--epochs", "1", "--log_steps", "1"]
DGC = ["--config", "configs/compressors/dgc.yaml"]

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


def tool(name: str) -> str | None:
    """A launcher that came with this Python, or is on the path."""
    return str(BIN / name) if (BIN / name).exists() else shutil.which(name)


def launch(workers: int, launcher: str = "torchrun") -> list[str]:
    """What to put before ``train.py``; skips the test where the launcher is not installed."""
    if launcher == "python":
        return [sys.executable]
    if launcher == "torchrun":
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
    needed = {"mpirun": "mpi4py", "horovodrun": "horovod"}[launcher]
    path = tool(launcher)
    if path is None or importlib.util.find_spec(needed) is None:
        pytest.skip(f"needs {launcher} and {needed}")
    options = ["--allow-run-as-root", "--oversubscribe"] if launcher == "mpirun" else []
    return [path, "-n" if launcher == "mpirun" else "-np", str(workers), *options, sys.executable]


ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(REPOSITORY / "tests" / "support" / "startup"),
    "CUDA_VISIBLE_DEVICES": "",
    "PATH": f"{BIN}:{os.environ['PATH']}",
}
"""On the CPU, one thread per worker."""


class Standing:
    """Workers that run ``train.py`` once after another, as tests/support/training.py says."""

    def __init__(self, workers: int) -> None:
        self.workers, self.orders = workers, 0
        self.folder = tempfile.TemporaryDirectory(prefix="dgcopt-training-")
        command = [
            *launch(workers, "python" if workers == 1 else "torchrun"),
            "tests/support/training.py",
            self.folder.name,
        ]
        environment = {**ENVIRONMENT, "PYTHONPATH": f"{REPOSITORY}:{ENVIRONMENT['PYTHONPATH']}"}
        self.output = open(Path(self.folder.name) / "output", "w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            command, cwd=REPOSITORY, env=environment, stdout=self.output, stderr=subprocess.STDOUT, text=True
        )

    def order(self, order: Any) -> Path:
        path = Path(self.folder.name) / f"order-{self.orders}.json"
        path.with_suffix(".part").write_text(json.dumps(order))
        path.with_suffix(".part").rename(path)
        self.orders += 1
        return path

    def run(self, arguments: Iterable[str], path: Path | None) -> "subprocess.CompletedProcess[str]":
        order = self.order({"arguments": list(arguments), "path": path and str(path)})
        names = [order.with_name(f"answer-{order.stem[6:]}-{rank}.json") for rank in range(self.workers)]
        deadline = time.monotonic() + 200
        while not all(name.exists() for name in names):
            assert self.process.poll() is None, f"they ended:\n{Path(self.output.name).read_text()[-3000:]}"
            assert time.monotonic() < deadline, "no answer"
            time.sleep(0.02)
        answers = [json.loads(name.read_text()) for name in names]
        out, err = ("".join(answer[stream] for answer in answers) for stream in ("stdout", "stderr"))
        return subprocess.CompletedProcess([], max(answer["code"] for answer in answers), out, err)

    def end(self) -> None:
        self.order("end")
        try:
            assert self.process.wait(60) == 0, Path(self.output.name).read_text()[-3000:]
        finally:
            self.process.kill()
            self.process.wait()
            self.output.close()
            self.folder.cleanup()


STANDING: dict[int, Standing] = {}


@pytest.fixture(scope="module", autouse=True)
def standing() -> Iterator[None]:
    """All of them end well, after so many runs."""
    yield
    while STANDING:
        STANDING.popitem()[1].end()


def execute(command: list[str] | int, *arguments: str, path: Path | None = None) -> "subprocess.CompletedProcess[str]":
    """Run ``train.py`` in the repository by a command of its own, or by so many standing workers."""
    if isinstance(command, int):
        if command not in STANDING:
            STANDING[command] = Standing(command)
        return STANDING[command].run(arguments, path)
    return subprocess.run(
        [*command, "train.py", *arguments],
        cwd=REPOSITORY,
        env={**ENVIRONMENT, **({"PYTHONPATH": f"{path}:{ENVIRONMENT['PYTHONPATH']}"} if path else {})},
        capture_output=True,
        text=True,
        timeout=200,
    )


def train(command: list[str] | int, output: Path, *arguments: str, path: Path | None = None) -> dict[str, Any]:
    """A run that must succeed; returns its result."""
    done = execute(command, *arguments, "--output", str(output), path=path)
    assert done.returncode == 0, done.stderr[-3000:]
    name = "evaluation.json" if "--evaluate" in arguments else "result.json"
    return json.loads((output / name).read_text())


def history(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "history.jsonl").read_text().splitlines()]


def refusal(*arguments: str, command: list[str] | int = 1) -> str:
    """The one line on stderr of a run that must fail without a traceback."""
    done = execute(command, *arguments)
    assert done.returncode > 0
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("train.py: ")
    return lines[0]


@pytest.fixture
def parser(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The parser of ``train.py``, in this process and in the repository."""
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.syspath_prepend(REPOSITORY)
    return importlib.import_module("train").make_parser()


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
        """The model is measured as it was: what was held back is not in it yet."""
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
            (base.parent / name).mkdir(parents=True)
            (base.parent / "run-away").mkdir(exist_ok=True)
            (base.parent / "runs-30").mkdir(exist_ok=True)
            assert choose(base, True, LocalComm()).name == fresh and choose(base, False, LocalComm()).name == newest
        base.rmdir()
        assert choose(base, True, LocalComm()).name == "run-12"


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

    @pytest.mark.parametrize("setting", [("--clip_norm", "1.0"), ("--op", "sum")])
    def test_settings_of_averaged_gradients_are_refused(self, setting: tuple[str, str]) -> None:
        assert "clip_norm and op are for averaged gradients" in refusal(*self.SETTINGS, *setting)


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


class TestSettings:
    @pytest.mark.parametrize("amp", ["bf16", "fp16"])
    def test_mixed_precision_trains_as_well(self, amp: str, tmp_path: Path) -> None:
        """In buckets of another size, with replicas compared at every second step, and a trace of three steps."""
        settings = [*SMALL, "--scale_lr", "false", "--optimizer.lr", "0.1", "--warmup_epochs", "0"]
        plain = train(1, tmp_path / "plain", *settings, "--batch_size", "64")
        more = ["--bucket_mb", "0.05", "--first_bucket_mb", "0.02", "--check_replicas_every", "2", "--trace_steps", "3"]
        result = train(2, tmp_path / amp, *settings, "--amp", amp, *more)
        assert 1e-4 < abs(result["test_loss"] / plain["test_loss"] - 1) < 0.05
        run = read_run(tmp_path / amp)
        assert len(run.sent) == 2, "buckets are smaller than the model"
        assert run.steps == 3 and set(run.phases) == {0, 1}
        names = [event["name"] for event in read_trace(tmp_path / amp / "trace-0.json")]
        assert sum("digests of parameters" in name for name in names) > 1, "weights are compared after the start too"

    def test_clipped_gradients_move_less(self, tmp_path: Path) -> None:
        """At a learning rate by which weights would explode."""
        result = train(2, tmp_path, *SMALL, "--optimizer.lr", "1000", "--clip_norm", "1e-9")
        losses = [entry["loss"] for entry in history(tmp_path) if "loss" in entry]
        assert losses[-1] == pytest.approx(losses[0], rel=0.1) and result["test_loss"] < 3

    def test_a_sum_at_half_the_lr_is_the_average(self, tmp_path: Path) -> None:
        plain = [*SMALL, "--scale_lr", "false", "--optimizer.weight_decay", "0", "--optimizer.lr"]
        average = train(2, tmp_path / "average", *plain, "0.02")
        total = train(2, tmp_path / "sum", *plain, "0.01", "--op", "sum")
        assert total["test_loss"] == pytest.approx(average["test_loss"], rel=1e-4)

    def test_short_run_with_dgc(self, tmp_path: Path) -> None:
        """Learning rate and ratio follow their warm-ups, the files are there, and the task is learned."""
        settings = ["--config", "configs/tasks/digits.yaml", "--epochs", "3", "--scheduler.T_max", "100"]
        settings += [*DGC, "--compressor.warmup.ratios", "[0.25]", "--compressor.ratio", "0.01"]
        settings += ["--warmup_epochs", "1", "--log_steps", "1", "--optimizer.lr", "0.03"]
        result = train(2, tmp_path, *settings)
        steps = [entry for entry in history(tmp_path) if "loss" in entry]
        assert [entry["step"] for entry in steps] == list(range(1, 67))
        assert [steps[step]["lr"] for step in (0, 11, 22)] == pytest.approx([0.03, 0.045, 0.06], rel=1e-3)
        # 8 bytes for each value that is sent of the four matrices; the vectors (234 values and padding) whole, in fp32
        for step, values in ((21, 37_768), (22, 1_512)):
            assert 4 * 234 <= steps[step]["payload_bytes"] - 8 * values <= 4 * 400
        assert result["ratio_fp32"] == pytest.approx(2 * result["ratio_bf16"]) and result["ratio_fp32"] > 4
        assert steps[-1]["residual_norm"] > 0 and steps[-1]["loss"] < steps[0]["loss"] / 2
        assert result["accuracy"] > 0.5
        assert list((tmp_path / "tensorboard").glob("events.*"))

    def test_print_config_composes_left_to_right(self, tmp_path: Path) -> None:
        yaml = pytest.importorskip("yaml")
        second = tmp_path / "second.yaml"
        second.write_text("epochs: 7\noptimizer:\n  init_args:\n    lr: 0.5\n")
        arguments = ["--config", "configs/tasks/digits.yaml", *DGC, "--config", str(second)]
        done = execute(1, *arguments, "--compressor.ratio", "0.01", "--print_config")
        assert done.returncode == 0, done.stderr
        shown = yaml.safe_load(done.stdout)
        assert shown["epochs"] == 7 and shown["batch_size"] == 32
        assert shown["optimizer"]["class_path"] == "torch.optim.SGD"
        assert shown["optimizer"]["init_args"]["lr"] == 0.5 and shown["optimizer"]["init_args"]["momentum"] == 0.9
        assert shown["compressor"]["init_args"]["ratio"] == 0.01
        assert shown["compressor"]["init_args"]["warmup"]["ratios"] == [0.25, 0.0625, 0.015625, 0.004]

    @pytest.mark.parametrize("path", sorted(REPOSITORY.glob("configs/*/*.yaml")), ids=lambda path: path.stem)
    def test_every_config_is_valid(self, path: Path, parser: Any) -> None:
        task = [] if path.parent.name == "tasks" else ["--config", str(REPOSITORY / "configs/tasks/digits.yaml")]
        config = parser.parse_args([*task, "--config", str(path)])
        if config.scheduler.class_path.endswith("CosineAnnealingLR"):
            assert config.scheduler.init_args.T_max == config.epochs
        if path.stem == "dgc":
            compressor = parser.instantiate(config).compressor
            assert compressor.ratio == 0.001 and compressor.warmup.ratios == (0.25, 0.0625, 0.015625, 0.004)

    def test_another_optimizer_keeps_what_fits(self, parser: Any) -> None:
        config = parser.parse_args([*SMALL, "--optimizer", "torch.optim.AdamW", "--optimizer.weight_decay", "0.1"])
        assert config.optimizer.class_path == "torch.optim.AdamW"
        assert config.optimizer.init_args.lr == 0.02 and "momentum" not in config.optimizer.init_args


FACTORIES = """
from collections.abc import Callable, Iterable
from pathlib import Path
import torch
from torch.optim import SGD, Optimizer

def unannotated(lr=0.1):
    Path("called").touch()

def of_another_type(lr: float = 0.1) -> int:
    Path("called").touch()

class Callable_:
    def __init__(self, lr: float = 0.1) -> None:
        Path("called").touch()
    def __call__(self, parameters):
        return SGD(parameters, 0.1)

def made(parameters: Iterable[torch.Tensor]) -> SGD:
    return SGD(parameters, 0.1)

def makes(lr: float = 0.1) -> Callable[[Iterable[torch.Tensor]], Optimizer]:
    return lambda parameters: SGD(parameters, lr)
"""


CALLED: dict[str, dict[str, Any]] = {
    "os.system": {"command": "touch called"},
    "os.mkdir": {"path": "called"},
    "subprocess.check_call": {"args": ["touch", "called"]},
    "builtins.exec": {"source": "open('called', 'w')"},
    "factories.unannotated": {},
    "factories.of_another_type": {},
    "factories.Callable_": {},
}
"""Names that make no optimizer, with arguments by which a call of them would leave a file behind."""


class TestRefusals:
    """Each ends in one line that names what is wrong and what would be right."""

    @pytest.mark.parametrize("module", ["jsonargparse", "tensorboard", "torch"])
    def test_a_package_that_is_not_installed(self, module: str) -> None:
        script = f"import runpy, sys; sys.modules[{module!r}] = None; sys.argv = ['train.py', *sys.argv[2:]]"
        script += "; runpy.run_path('train.py', run_name='__main__')"
        line = refusal(*SMALL, command=[sys.executable, "-c", script])
        assert module in line and 'pip install ".[train]"' in line

    @pytest.mark.parametrize(
        ("arguments", "named"),
        [
            (["--epoch_count", "3"], ["epoch_count", "epochs", "resume"]),
            (["--optimizer.learning_rate", "1"], ["learning_rate", "lr", "momentum"]),
            ([*DGC, "--compressor.ration", "0.1"], ["ration'", "ratio,"]),
            ([*DGC, "--compressor.warmup.epoch", "1"], ["'epoch'", "epochs"]),
            (["--model.widht", "8"], ["widht", "width"]),
            (["--model", "dgcopt.tasks.digits.Digit"], ["dgcopt.tasks.digits", "'Digit'"]),
            (["--epochs", "many"], ["epochs", "many"]),
            (["--batch_size", "0"], ["batch_size", "0"]),
            (["--wire", "pigeon"], ["wire", "pigeon", "horovod"]),
            (["--config", "nowhere.yaml"], ["config", "nowhere.yaml"]),
        ],
        ids=lambda value: value[-2] if value[0].startswith("--") else "",
    )
    def test_arguments(
        self, arguments: list[str], named: list[str], parser: Any, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as stop:
            parser.parse_args([*SMALL, *arguments])
        lines = capsys.readouterr().err.strip().splitlines()
        assert stop.value.code == 2 and len(lines) == 1 and lines[0].startswith("train.py: ")
        assert [name for name in named if name not in lines[0]] == []

    @pytest.mark.parametrize(
        ("setting", "name"),
        [
            *(("optimizer", name) for name in CALLED),
            *((setting, "os.system") for setting in ("scheduler", "averaging.init_args.outer", "model", "train_data")),
            *((setting, "factories.unannotated") for setting in ("scheduler", "averaging.init_args.outer")),
        ],
    )
    def test_a_function_that_makes_nothing_wanted_is_not_called(
        self,
        setting: str,
        name: str,
        tmp_path: Path,
        parser: Any,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        arguments = CALLED[name]
        value: Any = {"class_path": name, "init_args": arguments}
        for part in reversed(setting.split(".")):
            value = {part: value, **({"class_path": "dgcopt.DiLoCo"} if part == "init_args" else {})}
        (tmp_path / "evil.yaml").write_text(json.dumps(value))
        (tmp_path / "factories.py").write_text(FACTORIES)
        monkeypatch.syspath_prepend(tmp_path)
        with pytest.raises(SystemExit) as stop:
            parser.parse_args([*SMALL, "--config", str(tmp_path / "evil.yaml")])
        lines = capsys.readouterr().err.strip().splitlines()
        assert stop.value.code == 2 and len(lines) == 1 and lines[0].startswith("train.py: "), lines
        assert setting.partition(".")[0] in lines[0] and name.rpartition(".")[2] in lines[0], lines
        if setting == "optimizer":  # nor where a config was not read by parse_args
            config = parser.parse_args(SMALL)
            config.optimizer = type(config)(class_path=name, init_args=type(config)(arguments))
            with pytest.raises(ValueError, match="optimizer"):
                parser.instantiate(config)
        assert not Path("called").exists() and not (tmp_path / "called").exists()

    def test_functions_that_make_what_is_wanted(
        self, tmp_path: Path, parser: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "factories.py").write_text(FACTORIES)
        monkeypatch.syspath_prepend(tmp_path)
        param = torch.nn.Parameter(torch.ones(1))
        for name in ("factories.made", "factories.makes", "torch.optim.Adam"):
            settings = ["--optimizer", name] if name.endswith("made") else []
            if not settings:
                (tmp_path / "good.yaml").write_text(json.dumps({"optimizer": {"class_path": name}}))
                settings = ["--config", str(tmp_path / "good.yaml")]
            config = parser.parse_args([*SMALL, *settings])
            optimizer = parser.instantiate(config).optimizer([param])
            assert type(optimizer) is (torch.optim.Adam if name.endswith("Adam") else torch.optim.SGD)

    def test_a_nul_character(self, tmp_path: Path, parser: Any, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "nul.yaml").write_text('output: "a\\0b"\n')
        with pytest.raises(SystemExit):
            parser.parse_args([*SMALL, "--config", str(tmp_path / "nul.yaml")])
        assert "\"output\" is 'a\\x00b', with a NUL character" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("text", "named"),
        [
            ("batchsize: 8\n", ["batchsize", "batch_size"]),
            ("model:\n\twidth: 8\n", ["wrong.yaml", "line 2"]),
            ("# model\n", ["wrong.yaml", "names none"]),
        ],
    )
    def test_a_wrong_file(
        self, text: str, named: list[str], tmp_path: Path, parser: Any, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "wrong.yaml"
        path.write_text(text)
        with pytest.raises(SystemExit):
            parser.parse_args([*SMALL, "--config", str(path)])
        message = capsys.readouterr().err
        assert [part for part in named if part not in message] == []

    def test_unknown_key_ends_the_script(self) -> None:
        line = refusal(*SMALL, "--batchsize", "3", command=launch(1, "python"))
        assert "--batchsize" in line and "batch_size" in line

    def test_missing_data(self, tmp_path: Path) -> None:
        line = refusal(
            "--config", "configs/tasks/cifar10_resnet20.yaml", "--train_data.root", str(tmp_path / "nowhere")
        )
        for part in ("rank 0: ", str(tmp_path / "nowhere"), "cifar-10-batches-bin", "--train_data.init_args.root"):
            assert part in line

    def test_missing_data_on_two_workers(self, tmp_path: Path) -> None:
        settings = ["--config", "configs/tasks/cifar10_resnet20.yaml", "--train_data.root", str(tmp_path / "nowhere")]
        done = execute(launch(2), *settings)
        assert done.returncode != 0 and 'train.py", line' not in done.stderr
        assert "train.py: rank 0: no CIFAR-10" in done.stderr or "train.py: rank 1: no CIFAR-10" in done.stderr

    def test_bad_value(self, tmp_path: Path) -> None:
        assert "ratio" in refusal(*SMALL, *DGC, "--compressor.ratio", "20", "--output", str(tmp_path))

    def test_too_little_data(self, tmp_path: Path) -> None:
        assert "batch_size" in refusal(*SMALL, "--batch_size", "2000", "--output", str(tmp_path))

    @pytest.mark.parametrize("more", [[], ["--resume"], ["--output", "somewhere"]], ids=" ".join)
    def test_a_place_that_workers_do_not_find(
        self, more: list[str], parser: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Under Horovod Elastic they come later, when nobody tells them where the run is and that it has begun."""
        comm = LocalComm()
        comm.elastic = True
        monkeypatch.setattr(dgcopt, "init", lambda wire, deadline: comm)
        monkeypatch.setattr(sys, "argv", ["train.py", *SMALL, *more])
        with pytest.raises(SystemExit) as stop:
            importlib.import_module("train").main()
        assert stop.value.code == 1 and "say --output and --resume" in capsys.readouterr().err

    def test_a_checkpoint_of_another_model(self, tmp_path: Path) -> None:
        train(1, tmp_path, *SMALL)
        for what in ("--resume", "--evaluate"):
            line = refusal(*SMALL, "--model.width", "9", what, "--output", str(tmp_path))
            assert f"{tmp_path}/checkpoints is of another model: size mismatch for" in line
            assert "take the one that it was saved with, or another directory" in line

    def test_runs_that_cannot_be_compared(self, tmp_path: Path) -> None:
        """Each in one line, which names the folder."""
        alone = tmp_path / "alone"
        train(1, alone, *SMALL)
        unfinished = tmp_path / "unfinished"
        shutil.copytree(alone, unfinished)
        (unfinished / "result.json").unlink()
        for run, says in (
            (tmp_path / "nowhere", "is not the output folder of a run of train.py"),
            (unfinished, "has no result.json: the run has not ended"),
            (alone, "is a run of one worker, which sends nothing"),
        ):
            command = [sys.executable, "scripts/compare.py", str(run)]
            done = subprocess.run(command, cwd=REPOSITORY, env=ENVIRONMENT, capture_output=True, text=True, timeout=200)
            lines = done.stderr.strip().splitlines()
            assert done.returncode == 2 and len(lines) == 1 and lines[0].startswith(f"compare.py: {run} "), done.stderr
            assert says in lines[0]

    def test_nothing_to_evaluate(self, tmp_path: Path) -> None:
        assert str(tmp_path) in refusal(*SMALL, "--evaluate", "--output", str(tmp_path))
