"""What was written or named before modules moved: files in tests/data, public names, modules that pickles name.

tests/data/README.md says how the files were made. The hook's state goes on in the DDP tests, which have two processes.
"""

from __future__ import annotations

import importlib
import re
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import dgcopt

DATA = Path(__file__).parents[1] / "data"
make = SimpleNamespace(**runpy.run_path(str(DATA / "make.py")))
TOLERANCE = {"powersgd": 1e-5}
"""PowerSGD multiplies matrices, which CPUs do not round alike; elsewhere nothing is rounded (see make.py)."""


BY_MEAN = {("diloco", 1), ("diloco", 3)}
"""What two ranks held back of outer gradients counted by its sum then, among others; now by its mean, as it should."""


def assert_as_before(name: str, ours: torch.Tensor, case: Any) -> None:
    before = torch.load(DATA / name / ("by_mean.pt" if (name, case) in BY_MEAN else "after.pt"))[case]
    tolerance = TOLERANCE.get(name, 0.0)
    torch.testing.assert_close(ours, before, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("size", [2, 1, 3])
@pytest.mark.parametrize("name", make.WRAP)
def test_a_checkpoint_of_two_ranks_goes_on_as_before(name: str, size: int) -> None:
    states = make.read(DATA / name, size)
    assert_as_before(name, make.World(name, size).continued(states), size)


@pytest.mark.parametrize("name", make.OF_ALL)
def test_what_rank_0_saved_for_all_goes_on_as_before(name: str) -> None:
    states = [torch.load(DATA / name / "alone.pt") for _ in range(2)]
    assert_as_before(name, make.World(name).continued(states), "alone")


def test_an_exchange_was_under_way_and_ranks_were_apart() -> None:
    """Or the files would show less than they are kept for."""
    state = make.read(DATA / "diloco", 2)[0]["optimizer"]["averaging"]
    assert state["dgcopt"]["memory"]["outgoing"].keys() == make.Net().state_dict().keys()
    assert state["outers"][0]["dgcopt"]["memory"].keys() == {"momentum", "residual"}
    for name in ("diloco", "local_sgd", "decentralized"):
        first, second = make.read(DATA / name, 2)
        assert not torch.equal(first["model"]["first"], second["model"]["first"]), name


@pytest.mark.parametrize("rank", range(2))
def test_a_pickled_hook_is_read(rank: int) -> None:
    hook = torch.load(DATA / f"hook/rank-{rank}.pt", weights_only=False)["hook"]
    assert type(hook) is dgcopt.ddp.HookState
    clip, warmup = dgcopt.LocalClip(16.0), dgcopt.Warmup((0.5, 0.25), steps=2)
    assert repr(hook.compressor) == repr(dgcopt.DGC(0.1, clip=clip, warmup=warmup, overlap=True, source="gradient"))
    state = hook.state_dict()
    assert (state["rank"], state["world_size"], state["step"]) == (rank, 2, make.BEFORE)
    assert [bool(held.any()) for held in state["memory"]["residual"].values()] == [True, True], "of both matrices"
    assert dgcopt.ddp_hook(hook)[0] is hook


@pytest.mark.parametrize("file", sorted((DATA / "configs").glob("*.yaml")), ids=lambda file: file.stem)
def test_class_paths_of_configs_are_found(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jsonargparse")
    pytest.importorskip("sklearn")
    monkeypatch.syspath_prepend(str(DATA.parents[1]))
    importlib.import_module("train").make_parser().parse_args(["--config", str(file)])
    paths = set(re.findall(r"dgcopt\.tasks\.[\w.]+", file.read_text()))
    assert paths
    for path in paths:
        module, _, name = path.rpartition(".")
        assert callable(getattr(importlib.import_module(module), name))


PUBLIC_NAMES = """
    BF16 CLTK CSC DGC FP16 QSGD SGP SPARTA Adasum AsyncAverage Averaging ByteGrad CheckpointError ChunkedTopK Comm
    CommError Compressor ConfigError Context DGCError DeMo Decentralized DiLoCo DistributedOptimizer DivergenceError
    EFSignSGD Hierarchical LocalClip LocalSGD LowPrecisionDecentralized MismatchError Natural NoCompression Noop OneBit
    OneBitAdam PayloadError PowerSGD QAdam RandomK SignSGD Signum SlowMo SparseLoCo SparseSum Telemetry TernGrad
    Threshold TimeoutExceeded TopK Warmup __version__ averaging broadcast_object broadcast_optimizer_state
    broadcast_parameters check_replicas checkpoint ddp_hook init join shutdown simulate simulated_world
"""
"""`dgcopt.__all__` before the moves."""


def test_public_names_are_still_there() -> None:
    assert set(PUBLIC_NAMES.split()) <= set(dgcopt.__all__)
    assert all(hasattr(dgcopt, name) for name in PUBLIC_NAMES.split())


@pytest.mark.parametrize("module, name", [("ddp", "HookState"), ("memory", "LocalClip"), ("schedule", "Warmup")])
def test_modules_that_pickles_name_can_be_imported(module: str, name: str) -> None:
    assert isinstance(getattr(importlib.import_module(f"dgcopt.{module}"), name), type)
