"""Runs of train.py by a launcher's command, or by standing workers, which import torch once."""

import importlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jsonargparse")
pytest.importorskip("sklearn")

REPOSITORY = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
SMALL = ["--config", "configs/tasks/digits.yaml", "--model.width", "8", "--epochs", "1", "--log_steps", "1"]
DGC = ["--config", "configs/compressors/dgc.yaml"]


def tool(name: str) -> str | None:
    """Return the path of a launcher that came with this Python, or is on PATH."""
    return str(BIN / name) if (BIN / name).exists() else shutil.which(name)


def launch(workers: int, launcher: str = "torchrun") -> list[str]:
    """Return the words before ``train.py`` on a command line; skip the test if the launcher is not installed."""
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
    """Workers that run ``train.py`` again and again (tests/support/training.py)."""

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


def execute(command: list[str] | int, *arguments: str, path: Path | None = None) -> "subprocess.CompletedProcess[str]":
    """Run ``train.py`` in the repository by a command, or by a number of standing workers."""
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
    """Return the result of a run that must succeed."""
    done = execute(command, *arguments, "--output", str(output), path=path)
    assert done.returncode == 0, done.stderr[-3000:]
    name = "evaluation.json" if "--evaluate" in arguments else "result.json"
    return json.loads((output / name).read_text())


def history(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "history.jsonl").read_text().splitlines()]


def refusal(*arguments: str, command: list[str] | int = 1) -> str:
    """Return the one line on stderr of a run that must fail without a traceback."""
    done = execute(command, *arguments)
    assert done.returncode > 0
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("train.py: ")
    return lines[0]


def end_standing_workers() -> None:
    while STANDING:
        STANDING.popitem()[1].end()


def parser_of_train(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the parser of train.py, in this process and in the repository."""
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.syspath_prepend(REPOSITORY)
    return importlib.import_module("train").make_parser()
