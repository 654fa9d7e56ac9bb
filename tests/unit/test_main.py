"""The command `dgcopt`: lists of algorithms, their settings and costs, and the environment."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import dgcopt
from dgcopt.__main__ import algorithms, cost, library, main
from dgcopt.kernels import instructions
from dgcopt.kernels.native import library as loops


def test_the_command_lists_all_with_what_they_cost(capsys: pytest.CaptureFixture, monkeypatch) -> None:
    monkeypatch.setattr("sys.argv", ["dgcopt", "compressors"])
    assert main() == 0
    lines = capsys.readouterr().out.splitlines()
    named = {line.split()[0]: line.split() for line in lines[1:] if line and not line.startswith(("*", " "))}
    assert set(named) == {kind.__name__ for kind in library()}
    assert named["NoCompression"][1:4] == ["4,000,000", "1.0x", "1"]
    assert named["FP16"][1:4] == ["2,000,000", "2.0x", "1"]
    assert named["DGC"][1:4] == ["8,000", "500.0x", "1"]
    assert cost(dgcopt.Hierarchical)[0] == 4_000_000, "nothing is sent within a machine of one rank"


def test_the_command_shows_settings_as_one_writes_them(capsys: pytest.CaptureFixture, monkeypatch) -> None:
    monkeypatch.setattr("sys.argv", ["dgcopt", "compressors", "topk"])
    assert main() == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("dgcopt.TopK(ratio: float = 0.01, values: Literal['fp64', 'fp32'"), first


def test_a_reader_of_the_command_that_has_enough() -> None:
    command = f"{sys.executable} -m dgcopt averaging | true"
    told = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=100)
    assert not told.stderr


def test_command_shows_what_is_in_use(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["dgcopt", "env"])
    monkeypatch.setenv("DGCOPT_NODE", "a")
    assert main() == 0
    told = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert told["dgcopt"] == dgcopt.__version__ and told["torch"].startswith(torch.__version__)
    monkeypatch.setattr("sys.argv", ["dgcopt", "--version"])
    with pytest.raises(SystemExit, match=r"^0$"):
        main()
    assert capsys.readouterr().out.strip() == dgcopt.__version__
    assert told["kernels"] == f"native ({instructions()})" or told["kernels"].startswith("torch, as ")
    assert told["wires"].split(", ")[0] == "torch" and "DGCOPT_NODE=a" in told["settings"]


@pytest.mark.parametrize(
    ("choice", "status", "words"),
    [
        ("", 0, "torch, as the compiled loops are missing ("),
        ("torch", 0, "torch, as DGCOPT_KERNELS says"),
        ("native", 2, "none: DGCOPT_KERNELS=native, but the compiled loops are missing"),
        ("fast", 2, "none: DGCOPT_KERNELS must be"),
    ],
)
def test_command_says_why_loops_in_c_are_not_in_use(choice, status, words, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("sys.argv", ["dgcopt", "env"])
    monkeypatch.setenv("DGCOPT_KERNELS", choice)
    monkeypatch.setattr(loops, "_LIBRARY", tmp_path / "missing.so")
    loops._library.cache_clear()
    try:
        assert main() == status
        assert f"kernels   {words}" in capsys.readouterr().out
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        monkeypatch.setattr("torch.cuda.get_device_name", lambda: "a GPU")
        monkeypatch.setattr(dgcopt.kernels, "has_triton", lambda: choice != "torch")
        assert main() == status
        assert f"; on CUDA {'torch' if choice == 'torch' else 'triton'}" in capsys.readouterr().out
    finally:
        loops._library.cache_clear()


@pytest.mark.parametrize(
    ("command", "name", "begins", "holds"),
    [
        ("compressors", "topk", "dgcopt.TopK(ratio", "Costs one allgather"),
        ("averaging", "slowmo", "dgcopt.SlowMo(every", "lr"),
    ],
)
def test_the_command_shows_one_in_full(
    command: str, name: str, begins: str, holds: str, capsys: pytest.CaptureFixture, monkeypatch
) -> None:
    monkeypatch.setattr("sys.argv", ["dgcopt", command, name])
    assert main() == 0
    out = capsys.readouterr().out
    assert out.startswith(begins) and holds in out
    monkeypatch.setattr("sys.argv", ["dgcopt", command, "nothing"])
    assert main() == 2 and f"`dgcopt {command}` lists" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "name", "status", "words"),
    [
        ("compressors", "zoo.Mine", 0, "zoo.Mine(ratio: float = 0.5)\n\nA compressor of the user's.\n"),
        ("compressors", "zoo.Bare", 0, "zoo.Bare()\n\nWithout settings.\n"),
        ("averaging", "zoo.Often", 0, "zoo.Often(every: int"),
        ("averaging", "zoo.Mine", 2, "there is no Averaging 'zoo.Mine': `dgcopt averaging` lists all."),
        ("compressors", "Mine", 2, "with its module: `dgcopt compressors my_module.MyClass`."),
        ("compressors", "zoo.Other", 2, "'zoo.Other' cannot be imported: module 'zoo' has no attribute 'Other'"),
        ("compressors", "circus.Mine", 2, "'circus.Mine' cannot be imported: No module named 'circus'"),
    ],
)
def test_the_command_shows_a_class_of_the_user(command, name, status, words, tmp_path, monkeypatch, capsys):
    """From a module in the working directory, though the installed command has its own folder in `sys.path`."""
    (tmp_path / "zoo.py").write_text(
        "from __future__ import annotations\n"
        "import dataclasses, dgcopt\n"
        "@dataclasses.dataclass\n"
        "class Mine(dgcopt.Compressor):\n"
        '    "A compressor of the user\'s."\n'
        "    ratio: float = 0.5\n"
        "class Bare(dgcopt.Compressor):\n"
        "    'Without settings.'\n"
        "class Often(dgcopt.LocalSGD):\n"
        "    'Every step.'\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [place for place in sys.path if place])
    monkeypatch.setattr("sys.argv", ["dgcopt", command, name])
    assert main() == status
    told = capsys.readouterr()
    assert words in (told.err if status else told.out)


def test_the_command_lists_averaging_algorithms(capsys: pytest.CaptureFixture, monkeypatch) -> None:
    monkeypatch.setattr("sys.argv", ["dgcopt", "averaging"])
    assert main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [kind.__name__ for kind in algorithms()]
    assert all(len(line.split()) > 4 for line in lines)
