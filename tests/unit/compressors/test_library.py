"""Every compressor that comes with dgcopt keeps what `check_compressor` asks, and what it asks can be broken."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from torch import Tensor
from torch.optim import SGD

import dgcopt
from dgcopt.__main__ import algorithms, cost, library, main
from dgcopt.collectives import AllGather, AllReduce, SendRecv
from dgcopt.compressors import Compressor, Context, Encoded, Sparse
from dgcopt.kernels import instructions
from dgcopt.kernels.native import library as loops
from dgcopt.testing import ConformanceError, check_compressor
from tests.support.library import FIRST_OF_A_KIND, SETTINGS

CONFIGS = Path(__file__).parents[3] / "configs" / "compressors"

REFUSED_BY_DESIGN = {"Noop": "another result than rank 0", "Adasum": "the sum differs"}
"""Ranks without an exchange come apart, which is what it is for; Adasum neither sums nor averages."""


@pytest.mark.parametrize(("compressor", "given"), SETTINGS, ids=[repr(c)[:80] for c, _ in SETTINGS])
def test_it_keeps_what_every_compressor_must(compressor: Compressor, given: dict) -> None:
    """The first of a kind also among many ranks."""
    first = any(compressor is other for other, _ in FIRST_OF_A_KIND)
    report = check_compressor(compressor, sizes=(1, 3, 8) if first else (1, 3), **given)
    assert not report.failures and len(report.lines) == 9


OUT_OF_RANGE = {(dgcopt.PowerSGD, dgcopt.FP16): "the result for huge gradients holds NaN"}
"""Products of gradients beyond float16, which is what BF16 is for."""


@pytest.mark.parametrize("wrapper", [dgcopt.Hierarchical, dgcopt.FP16, dgcopt.BF16])
@pytest.mark.parametrize(("compressor", "given"), FIRST_OF_A_KIND, ids=[type(c).__name__ for c, _ in FIRST_OF_A_KIND])
def test_it_keeps_it_inside_another(compressor: Compressor, given: dict, wrapper: type[Compressor]) -> None:
    outcome = OUT_OF_RANGE.get((type(compressor), wrapper))
    if outcome is None:
        assert not check_compressor(wrapper(compressor), sizes=(2,), **given).failures
    else:
        with pytest.raises(ConformanceError, match=outcome):
            check_compressor(wrapper(compressor), sizes=(2,), **given)


def test_none_is_left_out() -> None:
    checked = {type(part).__name__ for compressor, _ in SETTINGS for part in compressor.parts()}
    assert {kind.__name__ for kind in library()} - checked == set(REFUSED_BY_DESIGN)
    for name, reason in REFUSED_BY_DESIGN.items():
        with pytest.raises(ConformanceError, match=reason):
            check_compressor(getattr(dgcopt, name)(), sizes=(2,))


@pytest.mark.parametrize("kind", library(), ids=lambda kind: kind.__name__)
def test_it_is_public_documented_and_has_a_config(kind: type[Compressor]) -> None:
    assert kind.__name__ in dgcopt.__all__
    words = kind.__doc__ or ""
    assert "Costs" in words and len(words.split("\n\n")) > 1, "what it is, how it works and what it costs"
    configs = [yaml.safe_load(path.read_text())["compressor"] for path in CONFIGS.glob("*.yaml")]
    chosen = {c if isinstance(c, str) else c["class_path"] for c in configs}
    assert f"dgcopt.{kind.__name__}" in chosen or kind.__name__ in REFUSED_BY_DESIGN


# -- each check can fail ---------------------------------------------------------------------------------------------


class Drifts(dgcopt.Compressor):
    """Ranks that add up in their own order get other bits."""

    def exchange(self, grad: Tensor, ctx: Context):
        rows = yield AllGather(grad)
        return (rows.roll(ctx.rank, 0).sum(0)) / ctx.divisor


class Infinite(dgcopt.Compressor):
    """Divides by a norm that half precision cannot hold."""

    carrier = AllReduce

    def compress(self, grad: Tensor, ctx: Context) -> Tensor:
        return grad * (grad.half() ** 9).sum().to(grad.dtype)

    def decompress(self, payloads: Tensor, ctx: Context) -> Tensor:
        return payloads


class Divides(dgcopt.Compressor):
    """By its own mean, which is zero of zeros."""

    def exchange(self, grad: Tensor, ctx: Context):
        return (yield AllReduce(grad / grad.abs().sum() * grad.numel(), op=ctx.op))


class Averages(dgcopt.Compressor):
    """Whatever was asked."""

    def exchange(self, grad: Tensor, ctx: Context):
        return (yield AllReduce(grad, op="average"))


class Remembers(dgcopt.Compressor):
    """In a place that no roll-back reaches."""

    def exchange(self, grad: Tensor, ctx: Context):
        ctx.scratch["sum"] = ctx.scratch.get("sum", torch.zeros_like(grad)) + grad
        return (yield AllReduce(ctx.scratch["sum"].clone(), op=ctx.op))


class Loses(Sparse):
    """What it does not send, though it says that it keeps it."""

    error_feedback = False

    @property
    def conserves(self) -> bool:
        return True

    def select(self, v: Tensor, ctx: Context) -> Tensor:
        return torch.arange(0, len(v), 64)


class Understates(dgcopt.NoCompression):
    """Its bytes."""

    def payload_bytes(self, ctx: Context) -> int:
        return 2 * ctx.numel


class Counts(dgcopt.NoCompression):
    """Its copies."""

    def __repr__(self) -> str:
        return f"Counts({id(self)})"


class TooManyRounds(dgcopt.Compressor):
    """On some ranks."""

    def exchange(self, grad: Tensor, ctx: Context):
        for _ in range(1 + ctx.rank % 2):
            grad = yield AllReduce(grad, op=ctx.op)
        return grad


class Rounded(Encoded):
    """Sends neighbours a different message than the one it decodes itself."""

    error_feedback = True

    def encode(self, values: Tensor, ctx: Context) -> Tensor:
        return values.half()

    def decode(self, message: Tensor, ctx: Context, rank: int) -> Tensor:
        return message.double() * (1 if rank != ctx.rank else 1.001)


@pytest.mark.parametrize(
    ("compressor", "failure"),
    [
        (Drifts(), "the same bits"),
        (Infinite(), "the same bits on all ranks, finite"),
        (Divides(), "zero, constant"),
        (Averages(), "a sum is size averages"),
        (Remembers(), "leaves no trace"),
        (Remembers(), "memory goes through a checkpoint"),
        (Loses(), "nothing is lost"),
        (Rounded(), "the same bits"),
        (Understates(), "bytes sent"),
        (Counts(), "settings can be compared"),
        (TooManyRounds(), "training with several buckets"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Compressor) else value,
)
def test_a_broken_one_is_caught_with_a_readable_report(compressor: Compressor, failure: str) -> None:
    with pytest.raises(ConformanceError) as caught:
        check_compressor(compressor, sizes=(2, 3))
    lines = [line for line in str(caught.value).splitlines() if line.strip().startswith(failure) or failure in line]
    assert lines and "rank(s): " in lines[0], str(caught.value)


# -- the command -----------------------------------------------------------------------------------------------------


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


def test_the_command_lists_averaging_algorithms(capsys: pytest.CaptureFixture, monkeypatch) -> None:
    monkeypatch.setattr("sys.argv", ["dgcopt", "averaging"])
    assert main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [kind.__name__ for kind in algorithms()]
    assert all(len(line.split()) > 4 for line in lines)


# -- what travels of an optimizer that is not SGD ---------------------------------------------------------------------


def test_updates_are_what_travels_unless_the_optimizer_is_sgd() -> None:
    expected = [
        (lambda p: SGD(p, lr=0.1, momentum=0.9), "gradient"),
        (lambda p: SGD(p, lr=0.1), "gradient"),
        (lambda p: torch.optim.LBFGS(p), "gradient"),
        (lambda p: torch.optim.AdamW(p), "update"),
        (lambda p: torch.optim.RMSprop(p), "update"),
    ]
    for make, source in expected:
        for compressor in (dgcopt.TopK(0.1), dgcopt.DGC(0.1), dgcopt.FP16(dgcopt.TopK(0.1))):
            settings = repr(compressor)
            compressor.attach(make([torch.nn.Parameter(torch.zeros(3))]))
            assert compressor.sends == source
            assert repr(compressor) == settings, "by which a rank that comes later compares itself"
    dense = dgcopt.DGC(1.0)
    dense.attach(torch.optim.AdamW([torch.nn.Parameter(torch.zeros(3))]))
    assert dense.sends == "gradient", "at ratio 1 it is dense training"


def test_what_cannot_be_is_refused_where_it_is_said() -> None:
    for make in (dgcopt.TopK, dgcopt.DGC):
        with pytest.raises(dgcopt.ConfigError, match=r"source must be .*not 'updates'"):
            make(0.1, source="updates").attach(SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.1))
    with pytest.raises(dgcopt.ConfigError, match="FP16 goes around a compressor, such as"):
        dgcopt.FP16("fp16")


def test_a_swap_between_neighbours_is_no_average() -> None:
    class Swaps(dgcopt.Compressor):
        def exchange(self, grad: Tensor, ctx: Context):
            return (yield SendRecv(grad, to=ctx.rank ^ 1, source=ctx.rank ^ 1))

    with pytest.raises(ConformanceError, match="rank 1 got another result"):
        check_compressor(Swaps(), sizes=(2,))
