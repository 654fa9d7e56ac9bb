"""Horovod's names in one process, and their likeness to Horovod's own; several ranks are in tests/distributed."""

import inspect
import subprocess
import sys

import pytest
import torch
from torch import nn

import dgcopt
import dgcopt.hvd as hvd

CALLS = {
    "rank": (),
    "size": (),
    "local_rank": (),
    "local_size": (),
    "cross_rank": (),
    "cross_size": (),
    "add_process_set": ([0],),
    "allreduce": (torch.ones(2),),
    "allreduce_": (torch.ones(2),),
    "allgather": (torch.ones(2),),
    "allgather_object": ({"loss": [1, 2.5]},),
    "barrier": (),
    "broadcast": (torch.ones(2), 0),
    "broadcast_": (torch.ones(2), 0),
    "broadcast_object": ("text", 0),
    "broadcast_parameters": ({"w": torch.ones(2)}, 0),
    "broadcast_optimizer_state": (torch.optim.SGD([torch.ones(2)], lr=0.1), 0),
}


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DGCOPT_WIRE", "local")
    hvd.init()
    yield
    hvd.shutdown()


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_it_is_imported_only_when_asked_for_and_needs_no_horovod():
    code = "import sys, dgcopt; print('dgcopt.hvd' in sys.modules); import dgcopt.hvd; print('horovod' in sys.modules)"
    assert run(code).split() == ["False", "False"]


def test_every_name_that_joins_nothing_is_called_here():
    without = {"Compression", "DistributedOptimizer", "ProcessSet", "global_process_set", "init", "is_initialized"}
    assert set(hvd.__all__) - set(CALLS) - without == {"Adasum", "Average", "Max", "Min", "Sum", "shutdown"}


@pytest.mark.parametrize("name", CALLS)
def test_before_init(name: str):
    assert not hvd.is_initialized()
    with pytest.raises(ValueError, match=r"not been initialized; call hvd\.init\(\)"):
        getattr(hvd, name)(*CALLS[name])


def test_wrong_names_are_refused_before_anything_is_joined():
    """In a process of its own, without a launcher."""
    code = """
import dgcopt, torch
from dgcopt.comm import launch
w = torch.nn.Parameter(torch.ones(2))
try:
    dgcopt.DistributedOptimizer(torch.optim.SGD([w], lr=0.1), [("w", w), ("w", torch.nn.Parameter(torch.ones(2)))])
except ValueError as error:
    print("duplicates: w" in str(error), launch._current)
"""
    assert run(code).split() == ["True", "None"]


def test_alone(alone):
    assert (hvd.rank(), hvd.local_rank(), hvd.cross_rank()) == (0, 0, 0)
    assert (hvd.size(), hvd.local_size(), hvd.cross_size()) == (1, 1, 1)
    tensor = torch.arange(6.0).view(2, 3).requires_grad_()
    for result in (
        hvd.allreduce(tensor, name="x"),
        hvd.allreduce(tensor, op=hvd.Max),
        hvd.allgather(tensor),
        hvd.broadcast(tensor, 0),
    ):
        assert torch.equal(result, tensor) and not result.requires_grad and result.data_ptr() != tensor.data_ptr()
    assert hvd.allreduce_(tensor) is tensor and hvd.broadcast_(tensor, 0) is tensor
    assert hvd.allgather(torch.tensor(7)).tolist() == [7] and hvd.allgather(torch.ones(0, 4)).shape == (0, 4)
    assert hvd.allgather_object({"a": (1, None)}) == [{"a": (1, None)}] and hvd.broadcast_object([2.5]) == [2.5]
    hvd.barrier()
    model = nn.Linear(2, 2)
    for params in (model.state_dict(), model.named_parameters(), list(model.parameters())):
        hvd.broadcast_parameters(params)


def test_shutdown_and_init_again(alone):
    kept = hvd.add_process_set([0])
    hvd.init()
    assert kept.included() and (kept.rank(), kept.size()) == (0, 1)
    hvd.shutdown()
    assert not hvd.is_initialized()
    hvd.init(process_sets=[kept])
    assert float(hvd.allreduce(torch.ones(()), process_set=kept)) == 1
    hvd.init(process_sets="dynamic")


def test_what_is_refused(alone):
    tensor = torch.ones(2)
    with pytest.raises(ValueError, match=r"Average, Sum, Min or Max here, not 2"):
        hvd.allreduce(tensor, op=hvd.Adasum)
    with pytest.raises(ValueError, match="not both"):
        hvd.allreduce(tensor, average=True, op=hvd.Sum)
    with pytest.raises(ValueError, match=r"ProcessSet\(\[0\]\) has not been added"):
        hvd.allreduce(tensor, process_set=hvd.ProcessSet([0]))
    with pytest.raises(ValueError, match=r"root_rank 1 is not in ProcessSet\(\[0\]\)"):
        hvd.broadcast(tensor, 1)
    with pytest.raises(ValueError, match="0 to 0"):
        hvd.add_process_set([0, 1])


def test_what_horovods_optimizer_is_given(alone):
    weight = nn.Parameter(torch.ones(2))
    for compression, wanted in ((hvd.Compression.none, dgcopt.NoCompression), (hvd.Compression.bf16, dgcopt.BF16)):
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([weight], lr=0.1), [("w", weight)], compression, process_set=hvd.global_process_set
        )
        assert type(optimizer.compressor) is wanted


def test_names_numbers_and_arguments_are_horovods():
    horovods = pytest.importorskip("horovod.torch")
    for name in hvd.__all__:
        ours, theirs = getattr(hvd, name), getattr(horovods, name)
        if isinstance(ours, int):
            assert ours == theirs, name
        elif inspect.isfunction(ours) and name not in ("init", "shutdown"):  # Horovod's take (*args, **kwargs)
            here, there = inspect.signature(ours).parameters, inspect.signature(theirs).parameters
            assert set(here) <= set(there) or name == "DistributedOptimizer", name
            by_place = [n for n, p in here.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
            assert by_place == list(there)[: len(by_place)], name
