"""Arguments of the wrong kind: each is a ConfigError where it is given, and none is taken for something else."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import dgcopt
import dgcopt.hvd as hvd
from dgcopt import ConfigError, data, elastic
from dgcopt.__main__ import algorithms, library
from dgcopt.averaging import Exponential, Ring
from dgcopt.testing import check_averaging, check_compressor

KINDS = [*library(), *algorithms(), dgcopt.Warmup, Exponential, Ring]
SETTINGS = [(kind, name) for kind in KINDS for name in list(inspect.signature(kind.__init__).parameters)[1:]]
SETTINGS += [(dgcopt.LocalClip, name) for name in ("max_norm", "value", "fn")]


@pytest.mark.parametrize(("kind", "setting"), SETTINGS, ids=lambda value: getattr(value, "__name__", value))
def test_of_no_setting_anything_goes(kind: Any, setting: str) -> None:
    for wrong in ("1%", [object()], {1: 1}, math.nan, math.inf, -0.5, torch.zeros(2)):
        with pytest.raises(ConfigError):
            kind(**{setting: wrong})


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_of_numpy_are_numbers_and_flags_are_not(kind: Any) -> None:
    defaults = {name: one.default for name, one in inspect.signature(kind).parameters.items()}
    numbers = {name: value for name, value in defaults.items() if type(value) in (int, float)}
    for name, value in numbers.items():
        assert repr(kind(**{name: (np.int64 if type(value) is int else np.float64)(value)})) == repr(kind()), name
        with pytest.raises(ConfigError):
            kind(**{name: True})


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("compressor", "make", "words"),
    [
        (dgcopt.DeMo(), torch.optim.Adam, "Adam would apply its own rule"),
        (dgcopt.PerParameter({"*": dgcopt.DeMo()}), torch.optim.Adam, "Adam would apply its own rule"),
        (dgcopt.FP16(dgcopt.Signum()), lambda p: torch.optim.SGD(p, 0.1, 0.9), "give SGD momentum=0"),
        (dgcopt.QAdam(), lambda p: torch.optim.SGD(p, 0.1), "needs torch.optim.Adam or AdamW"),
    ],
)
def test_impossible_combinations_are_refused_in_one_process_too(
    compressor: Any, make: Any, words: str, size: int
) -> None:
    optimizer = make([nn.Parameter(torch.ones(3))])
    kind, comm = type(optimizer), dgcopt.simulated_world(size)[0]
    for _ in range(2):
        with pytest.raises(ConfigError, match=words):
            dgcopt.DistributedOptimizer(optimizer, compression=compressor, comm=comm)
    assert type(optimizer) is kind, "it can be wrapped with another compressor"


def test_a_dataclass_of_ones_own_is_checked_by_its_annotations() -> None:
    from dataclasses import dataclass

    @dataclass(eq=False)
    class Mine(dgcopt.NoCompression):
        decay: float = 1
        every: int | None = None
        clip: dgcopt.LocalClip | None = None
        unknown: NotDefinedAnywhere = 3  # type: ignore[name-defined]  # noqa: F821

    Mine(decay="0.5")  # of annotations that cannot be resolved nothing is known
    del Mine.__annotations__["unknown"]

    @dataclass(eq=False)
    class Others(dgcopt.NoCompression):
        decay: float = 1
        every: int | None = None
        clip: dgcopt.LocalClip | None = None

    Others(2, 3, dgcopt.LocalClip(1.0))
    for settings, words in (
        ({"decay": "0.5"}, "decay must be a number, not '0.5'"),
        ({"every": 1.5}, "every must be a whole number or None, not 1.5"),
        ({"clip": 1.0}, "clip must be a dgcopt.LocalClip or None, not 1.0"),
    ):
        with pytest.raises(ConfigError, match=words):
            Others(**settings)


class Net(nn.Module):
    """Its parameters unpack into two, as pairs do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)


NET = Net()
CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    "broadcast a model": (lambda: dgcopt.broadcast_parameters(NET), r"model\.state_dict\(\)"),
    "broadcast parameters": (lambda: dgcopt.broadcast_parameters(NET.parameters()), "pairs of names and tensors"),
    "broadcast a list": (lambda: dgcopt.broadcast_parameters([*NET.parameters()]), "pairs of names and tensors"),
    "broadcast an optimizer's state": (
        lambda: dgcopt.broadcast_parameters(torch.optim.SGD(NET.parameters()).state_dict()),
        "without any tensor",
    ),
    "hvd: broadcast a model": (lambda: hvd.broadcast_parameters(nn.Sequential(NET)), r"model\.state_dict\(\)"),
    "compare a model": (lambda: dgcopt.check_replicas(NET), r"model\.state_dict\(\)"),
    "broadcast a model's state as an optimizer's": (lambda: dgcopt.broadcast_optimizer_state(NET), "no torch.optim"),
    "hvd: reduce a number": (lambda: hvd.allreduce(0.5), "hvd.allreduce takes a tensor, not 0.5"),
    "hvd: gather a number": (lambda: hvd.allgather(0.5), "hvd.allgather takes a tensor, not 0.5"),
    "hvd: a root that is no whole number": (lambda: hvd.broadcast_object(1, 0.0), "root_rank 0.0 is not in ProcessSet"),
    "hvd: a flag for a root": (lambda: hvd.broadcast_object(1, False), "root_rank False is not in ProcessSet"),
    "save, step": (lambda: dgcopt.checkpoint.save("x", {}, "1"), "step must be a whole number"),
    "save, keep": (lambda: dgcopt.checkpoint.save("x", {}, 1, keep=0), "keep must be a whole number"),
    "save, state first": (lambda: dgcopt.checkpoint.save({}, "x", 1), "directory must be a path"),
    "save, a model": (lambda: dgcopt.checkpoint.save("x", NET, 1), "state must be a dict"),
    "load a file": (lambda: dgcopt.checkpoint.load(__file__), "is a file: give the directory of checkpoints"),
    "load nowhere": (lambda: dgcopt.checkpoint.load(None), "directory must be a path"),
    "a world of no number": (lambda: dgcopt.simulated_world("2"), "size must be a whole number"),
    "check a class": (lambda: check_compressor(dgcopt.DGC), r"must be an instance: DGC\(\)"),
    "check what is unfinished": (lambda: check_compressor(dgcopt.Compressor()), r"must define exchange\(\)"),
    "check an averaging class": (lambda: check_averaging(dgcopt.LocalSGD), r"with its settings"),
    "average a model": (lambda: dgcopt.SlowMo(NET, every=3), "Net is no torch.optim.Optimizer"),
    "attach to a model": (lambda: dgcopt.LocalSGD().attach(NET), "Net is no torch.optim.Optimizer"),
    "join nobody": (lambda: dgcopt.join().__enter__(), "join needs the optimizers"),
    "join, a word for a flag": (lambda: dgcopt.join(wrapped(), enable="no").__enter__(), "enable must be True or"),
    "hook, no scaler": (lambda: dgcopt.ddp_hook(scaler=True), "scaler must be the loop's"),
    "elastic, no model": (lambda: elastic.State("x", model=None, optimizer=wrapped()), "needs the model"),
    "init, deadline": (lambda: dgcopt.init(deadline="10"), "deadline must be a positive number"),
    "init, checksums": (lambda: dgcopt.init(checksums="no"), "checksums must be True or False"),
    "wire by name": (lambda: wrapped(comm="torch"), r"comm must be the result of dgcopt\.init\(\)"),
    "ranks as a wire": (lambda: wrapped(comm=[0, 1]), r"process_set=\[\.\.\.\]"),
    "averaging, wire by name": (lambda: dgcopt.LocalSGD(sgd(), comm="torch"), "comm must be the result"),
    "hook, wire by name": (lambda: dgcopt.ddp_hook(comm="torch"), "comm must be the result"),
    "names of no parameters": (lambda: wrapped(named_parameters=[("a", 1)]), r"tuples \(name, parameter\)"),
    "names that are numbers": (lambda: wrapped(named_parameters=enumerate(NET.parameters())), "tuples"),
    "a word for a flag": (lambda: wrapped(sparse_as_dense="no"), "sparse_as_dense must be True or False"),
    "an unfinished compressor": (lambda: wrapped(compression=dgcopt.Compressor()), r"must define exchange\(\)"),
    "SGD's state for Adam": (
        lambda: wrapped(torch.optim.Adam(NET.parameters())).load_state_dict(wrapped().state_dict()),
        "this state lacks betas, eps, which Adam needs: another kind of optimizer saved it",
    ),
    "SGD's momentum for Adam": (
        lambda: wrapped(torch.optim.Adam(NET.parameters())).load_state_dict(
            {**sgd().state_dict(), "state": {0: {"momentum_buffer": torch.ones(2, 2)}}}
        ),
        "this state lacks step, which Adam needs: another kind of optimizer saved it",
    ),
    "a model's state for an optimizer": (lambda: wrapped().load_state_dict(NET.state_dict()), "no optimizer's state"),
    "elastic.run of nothing": (lambda: elastic.run(None), "takes a function of a State"),
    "costs that are none": (
        lambda: balanced(complexity_fn=None),
        "complexity_fn must be a function of a sample",
    ),
    "a dataset without length": (lambda: balanced(iter([1])), "no samples by index"),
    "batches that are none": (lambda: [*batches(lambda samples: 3)], "a list of lists of samples, not \\[3\\]"),
    "batches that are samples": (lambda: [*batches(list)], "a list of lists of samples, not"),
    "a store that is none": (lambda: data.CachedDataset([1], store=None), 'store must be "memory"'),
    "a list of stores": (lambda: data.CachedDataset([1], store=["disk"]), 'store must be "memory"'),
    "epochs of no length": (lambda: dgcopt.DGC(warmup=dgcopt.Warmup()).set_steps_per_epoch(0), "steps_per_epoch must"),
}


def balanced(dataset: Any = (1, 2, 3), complexity_fn: Any = int) -> Any:
    return data.LoadBalancingDistributedSampler(dataset, complexity_fn, num_replicas=2, rank=0)


def batches(batch_fn: Any) -> Any:
    return data.LoadBalancingDistributedBatchSampler(balanced(), batch_fn)


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD(Net().parameters(), lr=0.1)


def wrapped(optimizer: Any = None, **settings: Any) -> Any:
    return dgcopt.DistributedOptimizer(optimizer or sgd(), **{"comm": dgcopt.simulated_world(2)[0], **settings})


@pytest.mark.parametrize("name", CALLS)
def test_wrong_arguments_are_refused(name: str) -> None:
    call, words = CALLS[name]
    try:
        if name.startswith("hvd"):
            hvd.init()
        with pytest.raises(ConfigError, match=words):
            call()
    finally:
        hvd.shutdown()
        dgcopt.shutdown()


def test_a_state_that_was_refused_leaves_the_optimizer_as_it_was() -> None:
    ours = wrapped(torch.optim.Adam(NET.parameters(), lr=0.5))
    for _ in range(2):
        with pytest.raises(ConfigError, match="this state lacks betas"):
            ours.load_state_dict(wrapped().state_dict())
        assert ours.param_groups[0]["lr"] == 0.5 and ours.param_groups[0]["betas"] == (0.9, 0.999)


@pytest.mark.parametrize("root", ["0", None, 5, -1, 0.0, True])
def test_a_root_that_does_not_exist(root: Any) -> None:
    comm = dgcopt.simulated_world(2)[0]
    with pytest.raises(dgcopt.CommError, match="is not among the 2 ranks"):
        dgcopt.broadcast_object(1, root, comm=comm)


@pytest.mark.parametrize("wrong", [NET, torch.optim.SGD])
def test_a_checkpoint_that_could_not_be_loaded_is_not_written(wrong: Any, tmp_path: Any) -> None:
    dgcopt.checkpoint.save(tmp_path, {"step": 1}, 1)
    with pytest.raises(dgcopt.CheckpointError, match=r"holds \S+\.(Net|SGD), which could not be loaded.*state_dict"):
        dgcopt.checkpoint.save(tmp_path, {"model": wrong}, 2)
    assert dgcopt.checkpoint.load(tmp_path) == (1, {"step": 1})
    with pytest.raises(ConfigError, match=f"is one checkpoint: give the directory .*, here maybe {tmp_path}$"):
        dgcopt.checkpoint.load(tmp_path / "step-00000001")
    dgcopt.shutdown()
