"""train.py's settings: shown, merged and checked; each mistake is one line that names it."""

import importlib
import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import dgcopt
from dgcopt.comm import LocalComm
from dgcopt.flat.optimizer_state import STATE_KEY
from dgcopt.tuning.report import read_run, read_trace
from tests.support.train_script import (
    DGC,
    ENVIRONMENT,
    REPOSITORY,
    SMALL,
    execute,
    history,
    launch,
    refusal,
    train,
)

OVERFLOWING = """
from dgcopt.tasks.digits import DigitsCNN

class Sometimes(DigitsCNN):
    calls = 0

    def forward(self, x):
        self.calls += self.training
        return super().forward(x) * (float("inf") if self.training and self.calls in (2, 5) else 1)
"""

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("standing_workers")]


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


MODELS = """
import torch
class Classes(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(64, 3)
    def forward(self, x):
        return super().forward(x.flatten(1))
class Empty(torch.utils.data.Dataset):
    def __len__(self):
        return 0
class Tokens(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(2, 10)
    def forward(self, x):
        return self.tokens(x.mul(100).long().flatten(1)).mean(1)
"""


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

    @pytest.mark.parametrize(
        ("settings", "said"),
        [
            ("seed: 99999999999999999999", "seed is 1e+20, and must lie within 62 bits"),
            ("epochs: null", "epochs is null, and needs a value"),
            ("output: ''", "output is empty"),
            ("warmup_epochs: .inf", "warmup_epochs is inf, and must be finite"),
            ("model: {class_path: dgcopt.tasks.digits.DigitsCNN, init_args: {width: -1}}", "do not fit: RuntimeError"),
            ("optimizer: {class_path: torch.optim.SGD, init_args: {lr: .nan}}", "optimizer: lr is nan, and must be"),
            ("optimizer: {class_path: torch.optim.SGD, init_args: {lr: .inf}}", "optimizer: lr is inf"),
            ("optimizer: {class_path: torch.optim.SGD, init_args: {weight_decay: .nan}}", "weight_decay is nan"),
            ("optimizer: {class_path: torch.optim.SGD, init_args: {momentum: null}}", "do not fit: TypeError: '<' not"),
            ("optimizer: {class_path: torch.optim.LBFGS}", "optimizer: LBFGS needs a closure"),
            ("scheduler: {class_path: torch.optim.lr_scheduler.CosineAnnealingLR, init_args: {T_max: 0}}",
             "scheduler: CosineAnnealingLR cannot go on after step 44: ZeroDivisionError: "),
            ("scheduler: {class_path: torch.optim.lr_scheduler.OneCycleLR, init_args: {max_lr: 1, total_steps: 3}}\n"
             "scheduler_interval: step", "OneCycleLR cannot go on after step 3: ValueError: Tried to step 4 times"),
            ("scheduler: {class_path: torch.optim.lr_scheduler.ReduceLROnPlateau}\nscheduler_interval: step",
             "ReduceLROnPlateau follows the test loss, so scheduler_interval must be epoch"),
            ("model: {class_path: torch.nn.Linear, init_args: {in_features: 4, out_features: 3}}",
             "do not take a batch of inputs of (32, 1, 8, 8) with targets of (32,): RuntimeError: mat1 and mat2"),
            ("test_data: {class_path: small.Empty}", "test_data is empty, and must have samples"),
            ("train_data: {class_path: small.Empty}", "train_data is empty"),
            ("model: {class_path: small.Classes}", "with targets of (32,): IndexError: Target"),
            ("model: {class_path: small.Tokens}", "IndexError: index out of range in self (at "),
        ],
        ids=lambda value: value[:70],
    )  # fmt: skip
    def test_settings_that_fail_late(self, settings: str, said: str, tmp_path: Path) -> None:
        """When objects are made, at a batch that they do not take, or at a step of the schedule."""
        (tmp_path / "late.yaml").write_text(settings)
        (tmp_path / "small.py").write_text(MODELS)
        small = [] if "model" in settings else ["--model.width", "4"]
        output = [] if "output" in settings else ["--output", str(tmp_path / "run")]
        done = execute(1, *SMALL, *small, "--config", str(tmp_path / "late.yaml"), *output, path=tmp_path)
        lines = done.stderr.strip().splitlines()
        assert done.returncode == 1 and len(lines) == 1 and lines[0].startswith("train.py: rank 0: "), done.stderr
        assert said in lines[0]

    @pytest.mark.parametrize("name", ["run", "run/inner", "folder/history.jsonl", "folder/tensorboard"])
    def test_an_output_that_cannot_be_written(self, name: str, tmp_path: Path) -> None:
        """A file in place of a folder, and a folder in place of a file."""
        (tmp_path / "run").write_text("")
        if name.startswith("folder"):
            train(1, tmp_path / "folder", *SMALL)
            target = tmp_path / name
            target.unlink() if target.is_file() else shutil.rmtree(target)
            target.mkdir() if name.endswith("jsonl") else target.write_text("")
        output = tmp_path / name if name.startswith("run") else tmp_path / "folder"
        line = refusal(*SMALL, "--epochs", "2", "--resume", "--output", str(output))
        assert f"{tmp_path / name}: " in line and "Correct it, or choose another --output" in line

    def test_no_text_file(self, tmp_path: Path, parser: Any, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "binary.yaml").write_bytes(b"\xc3\x28")
        with pytest.raises(SystemExit):
            parser.parse_args([*SMALL, "--config", str(tmp_path / "binary.yaml")])
        assert "binary.yaml: this is no text file (invalid continuation byte)" in capsys.readouterr().err

    def test_a_checkpoint_of_other_settings(self, tmp_path: Path) -> None:
        """The checkpoint's hold, which is said; a scaler begins anew; damaged lines of the history are left out."""
        train(1, tmp_path, *SMALL)
        path = tmp_path / "history.jsonl"
        kept = [line.encode() for line in path.read_text().splitlines(keepends=True)]
        path.write_bytes(b"".join([*kept[:5], b'{"step": 6, "lo\n', b"3\n", b"\xff\n", kept[6], b'{"st']))
        resumed = ["--resume", "--output", str(tmp_path)]
        more = ["--optimizer.lr", "5", "--amp", "fp16", "--scheduler", "torch.optim.lr_scheduler.StepLR"]
        done = execute(1, *SMALL, *more, "--scheduler.step_size", "9", "--epochs", "2", *resumed)
        assert done.returncode == 0, done.stderr
        for number in (6, 7, 8):
            assert f"history.jsonl, line {number}, is damaged and left out (" in done.stdout
        assert "the optimizer's lr is 0.02, as in the checkpoint, not 5" in done.stdout
        assert "the checkpoint is of another scheduler than StepLR, with T_max, eta_min" in done.stdout
        assert [one["step"] for one in history(tmp_path)[:6]] == [1, 2, 3, 4, 5, 7]

    def test_a_checkpoint_of_the_same_settings(self, tmp_path: Path) -> None:
        """Nothing is said, although the scheduler has moved lr and momentum."""
        name = "torch.optim.lr_scheduler.OneCycleLR"
        more = ["--scheduler", name, "--scheduler.max_lr", "0.1", "--scheduler.total_steps", "9", "--model.width", "4"]
        train(1, tmp_path, *SMALL, *more)
        done = execute(1, *SMALL, *more, "--epochs", "2", "--resume", "--output", str(tmp_path))
        assert done.returncode == 0 and "the checkpoint" not in done.stdout, done.stdout

    @pytest.mark.parametrize("workers", [1, 2])
    def test_a_resumed_run_counts_on(self, workers: int, tmp_path: Path) -> None:
        """Seconds and skipped steps are those of the whole run, by one worker's scaler or by all workers."""
        (tmp_path / "overflowing.py").write_text(OVERFLOWING)
        output = tmp_path / "run"
        more = [*SMALL, *DGC, "--model", "overflowing.Sometimes", "--model.width", "8", "--amp", "fp16"]
        first = train(workers, output, *more, path=tmp_path)
        assert first["skipped"] == 2 and history(output)[0]["skipped"] == 0
        second = train(workers, output, *more, "--epochs", "2", "--resume", path=tmp_path)
        logged = [(one["seconds"], one["skipped"]) for one in history(output) if "loss" in one]
        assert logged == sorted(logged) and logged[-1][0] <= second["seconds"]
        assert first["seconds"] <= logged[len(logged) // 2][0]
        assert second["skipped"] == logged[-1][1] == 4

    def test_a_checkpoint_of_other_positions(self, tmp_path: Path) -> None:
        """Settings that give a position in an epoch and a schedule its meaning; the ratio's warm-up follows epochs."""
        more = [*SMALL, *DGC, "--checkpoint_steps", "11", "--output", str(tmp_path)]
        train(2, tmp_path, *more)
        shutil.rmtree(tmp_path / "checkpoints" / "step-00000022")
        others = ["--seed", "3", "--batch_size", "16", "--scheduler_interval", "step"]
        done = execute(2, *more, *others, "--resume")
        assert done.returncode == 0, done.stderr
        assert (
            "seed is 3, and in the checkpoint 0: another order begins after 704 samples: of this epoch" in done.stdout
        )
        assert "batch_size is 16, and in the checkpoint 32: the rest of the epoch and warm-ups follow" in done.stdout
        assert "scheduler_interval is step, and in the checkpoint epoch: the scheduler takes" in done.stdout
        (last,) = tmp_path.glob("checkpoints/step-00000033/rank-*0.pt")  # 11 steps, and 22 of half as many samples
        assert torch.load(last, weights_only=True)["optimizer"][STATE_KEY]["step"] == 44
        done = execute(2, *more, *others, "--epochs", "2", "--resume")
        assert done.returncode == 0 and "the checkpoint" not in done.stdout, done.stdout

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
