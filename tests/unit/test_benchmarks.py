"""Benchmarks that drive parts of the library by themselves still run, and print a table with a row for each system."""

import importlib
import sys
from pathlib import Path

import pytest

SMALLEST = {
    "bench_kernels": "--rounds 1",
    "bench_kernels --compressors": "--rounds 1 --compressors QSGD DeMo",
    "bench_operations": "--numel 8192 --rounds 1",
    "bench_models": "--models tiny --rounds 1 --turns 1",
    "bench_reduce": "--ranks 2 --rounds 1",
    "bench_membership": "--sizes 4 --failures 2",
    "bench_replicas": "--device cpu --shape 1 1 16 --context 8 --batch 1 --replicas 2 --steps 4 --methods dense",
}


@pytest.mark.parametrize("name", SMALLEST)
def test_it_runs(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    module, arguments = name.split()[0], SMALLEST[name].split()
    if module == "bench_replicas":
        arguments += ["--folder", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [f"{module}.py", *arguments])
    importlib.import_module(module).main()
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(rows) > 2 and all(row.count("|") > 2 for row in rows)
