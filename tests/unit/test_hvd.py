"""Horovod's names in one process, and their likeness to Horovod's own; several ranks are in tests/distributed."""

import inspect
import subprocess
import sys
import threading
import time
import types

import pytest
import torch
from torch import nn

import dgcopt
import dgcopt.hvd as hvd
from dgcopt.hvd.variants import Handle

CALLS = {
    "rank": (),
    "size": (),
    "local_rank": (),
    "local_size": (),
    "cross_rank": (),
    "cross_size": (),
    "add_process_set": ([0],),
    "remove_process_set": (hvd.ProcessSet([0]),),
    "mpi_threads_supported": (),
    **dict.fromkeys(("allreduce", "allreduce_", "allreduce_async", "allreduce_async_"), (torch.ones(2),)),
    **dict.fromkeys(("allgather", "allgather_async", "alltoall", "alltoall_async"), (torch.ones(2),)),
    **dict.fromkeys(("reducescatter", "reducescatter_async"), (torch.ones(2),)),
    **dict.fromkeys(("broadcast", "broadcast_", "broadcast_async", "broadcast_async_"), (torch.ones(2), 0)),
    **dict.fromkeys(("grouped_allreduce", "grouped_allreduce_"), ([torch.ones(2)],)),
    **dict.fromkeys(("grouped_allreduce_async", "grouped_allreduce_async_"), ([torch.ones(2)],)),
    **dict.fromkeys(("grouped_allgather", "grouped_allgather_async"), ([torch.ones(2)],)),
    **dict.fromkeys(("grouped_reducescatter", "grouped_reducescatter_async"), ([torch.ones(2)],)),
    "sparse_allreduce_async": (torch.ones(2).to_sparse(), "name", hvd.Sum),
    "allgather_object": ({"loss": [1, 2.5]},),
    "barrier": (),
    "broadcast_object": ("text", 0),
    "broadcast_parameters": ({"w": torch.ones(2)}, 0),
    "broadcast_optimizer_state": (torch.optim.SGD([torch.ones(2)], lr=0.1), 0),
}

BUILT = [name for name in hvd.__all__ if name.endswith(("_built", "_enabled"))]
INSTEAD = ("join", "SyncBatchNorm", "start_timeline", "stop_timeline")


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
    without |= {*BUILT, "HorovodInternalError", "poll", "synchronize"}
    assert set(hvd.__all__) - set(CALLS) - without == {"Adasum", "Average", "Max", "Min", "Product", "Sum", "shutdown"}


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
        hvd.allreduce(tensor, op=hvd.Product).detach(),
        hvd.allgather(tensor),
        hvd.broadcast(tensor, 0),
        hvd.alltoall(tensor),
        hvd.reducescatter(tensor, op=hvd.Sum),
        *hvd.grouped_allreduce([tensor], prescale_factor=0.5, postscale_factor=2.0),
        hvd.synchronize(hvd.allgather_async(tensor)),
    ):
        assert torch.equal(result, tensor) and result.data_ptr() != tensor.data_ptr()
        if result.requires_grad:
            assert torch.autograd.grad((3 * result).sum(), tensor)[0].eq(3).all()
    with pytest.raises(ValueError, match=r"Average or hvd\.Sum only"):
        hvd.allreduce(tensor, op=hvd.Max).sum().backward()
    handle = hvd.allreduce_async_(tensor, op=hvd.Sum)
    assert hvd.poll(handle) and hvd.synchronize(handle) is hvd.synchronize(handle) is tensor
    assert [t.tolist() for t in hvd.alltoall(torch.arange(3), [3])] == [[0, 1, 2], [3]]
    assert hvd.allreduce(torch.tensor([5]), prescale_factor=0.5).tolist() == [2]
    wave = torch.tensor([1 + 2j, -4j])
    assert torch.equal(hvd.allreduce(wave, prescale_factor=0.5, postscale_factor=3.0), wave * 1.5)
    assert torch.equal(hvd.reducescatter(wave, op=hvd.Average, postscale_factor=0.5), wave * 0.5)
    half = hvd.allreduce(torch.tensor([1 + 2.0**-12]), compression=hvd.Compression.fp16)
    assert half.dtype == torch.float32 and half.item() == 1
    rows = torch.sparse_coo_tensor([[1, 1]], [2.0, 3.0], (4,))
    assert hvd.sparse_allreduce_async(rows, "rows", hvd.Average)().to_dense().tolist() == [0, 5, 0, 0]
    assert hvd.allreduce_(tensor) is tensor and hvd.broadcast_(tensor, 0) is tensor
    assert hvd.allgather(torch.tensor(7)).tolist() == [7] and hvd.allgather(torch.ones(0, 4)).shape == (0, 4)
    assert hvd.allgather_object({"a": (1, None)}) == [{"a": (1, None)}] and hvd.broadcast_object([2.5]) == [2.5]
    hvd.barrier()
    model = nn.Linear(2, 2)
    for params in (model.state_dict(), model.named_parameters(), list(model.parameters())):
        hvd.broadcast_parameters(params)


def test_a_default_device_is_not_followed(alone):
    tensor = torch.arange(6.0).view(2, 3).requires_grad_()
    with torch.device("meta"):
        hvd.barrier()
        hvd.allgather(tensor).sum().backward()
        assert hvd.alltoall(tensor, [2])[1].is_cpu
        assert hvd.sparse_allreduce_async(torch.eye(2, device="cpu").to_sparse(), "eye", hvd.Sum)().is_cpu
    assert tensor.grad.eq(1).all()


def test_threads_that_wait_for_one_handle_share_its_result():
    """Each would divide the sum that has arrived by the number of ranks."""
    sums = [6.0]

    def finish():
        time.sleep(0.05)
        sums[0] /= 2
        return sums[0]

    handle, found = Handle(lambda: True, finish), []
    threads = [threading.Thread(target=lambda: found.append(hvd.synchronize(handle))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [3.0] * 3


def test_shutdown_and_init_again(alone):
    kept = hvd.add_process_set([0])
    hvd.init()
    assert kept.included() and (kept.rank(), kept.size()) == (0, 1)
    hvd.shutdown()
    assert not hvd.is_initialized()
    for _ in range(2):  # its process group was left open by the second
        hvd.init(process_sets=[kept])
        assert hvd.add_process_set(kept) is kept
    assert hvd.world._added.count(kept) == 1
    assert float(hvd.allreduce(torch.ones(()), process_set=kept)) == 1
    hvd.init(process_sets="dynamic")
    dgcopt.shutdown()
    assert not hvd.is_initialized()
    with pytest.raises(ValueError, match="has not been initialized"):
        hvd.rank()
    hvd.init()
    assert (hvd.rank(), hvd.size()) == (0, 1) and float(hvd.allreduce(torch.ones(()))) == 1


def test_wrong_arguments_are_refused(alone):
    tensor = torch.ones(2)
    with pytest.raises(ValueError, match=r"Average, Sum, Min, Max or Product here, not 2"):
        hvd.allreduce(tensor, op=hvd.Adasum)
    for op in (hvd.Min, hvd.Max):
        with pytest.raises(ValueError, match="complex numbers have no order"):
            hvd.allreduce(tensor * 1j, op=op)
    with pytest.raises(ValueError, match="not both"):
        hvd.allreduce(tensor, average=True, op=hvd.Sum)
    with pytest.raises(ValueError, match=r"ProcessSet\(\[0\]\) has not been added"):
        hvd.allreduce(tensor, process_set=hvd.ProcessSet([0]))
    with pytest.raises(ValueError, match=r"root_rank 1 is not in ProcessSet\(\[0\]\)"):
        hvd.broadcast(tensor, 1)
    with pytest.raises(ValueError, match=r"root_rank 1 is not in ProcessSet\(\[0\]\)"):
        hvd.broadcast_object(tensor, 1)
    with pytest.raises(ValueError, match=r"root_rank 1 is not in ProcessSet\(\[0\]\)"):
        hvd.broadcast_parameters([tensor], 1)
    with pytest.raises(ValueError, match=r"root_rank 1 is not in ProcessSet\(\[0\]\)"):
        hvd.broadcast_optimizer_state(torch.optim.SGD([tensor], lr=0.1), 1)
    with pytest.raises(ValueError, match="0 to 0"):
        hvd.add_process_set([0, 1])
    with pytest.raises(ValueError, match=r"splits \[1\]; on rank\(s\) \[0\] splits are not 1 numbers that add up"):
        hvd.alltoall(tensor, [1])
    with pytest.raises(ValueError, match="not a scalar"):
        hvd.reducescatter(torch.tensor(1.0))
    with pytest.raises(ValueError, match="none, fp16 or bf16"):
        hvd.allreduce(tensor, compression=dgcopt.DGC(0.1))
    assert not hvd.remove_process_set(hvd.global_process_set) and not hvd.remove_process_set(hvd.ProcessSet([0]))
    added = hvd.add_process_set([0])
    assert hvd.remove_process_set(added)
    with pytest.raises(ValueError, match="has not been added"):
        hvd.allreduce(tensor, process_set=added)


def test_horovods_compression_selects_a_compressor(alone):
    weight = nn.Parameter(torch.ones(2))
    for compression, wanted in ((hvd.Compression.none, dgcopt.NoCompression), (hvd.Compression.bf16, dgcopt.BF16)):
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([weight], lr=0.1), [("w", weight)], compression, process_set=hvd.global_process_set
        )
        assert type(optimizer.compressor) is wanted


def test_compression_by_hand():
    """As Horovod's, on any tensor, before and without `init`."""
    for name, dtype in (("none", torch.float32), ("fp16", torch.float16), ("bf16", torch.bfloat16)):
        compression, tensor = getattr(hvd.Compression, name), torch.tensor([1.0, 1 / 3])
        message, ctx = compression.compress(tensor)
        assert message.dtype == dtype and torch.equal(message, tensor.to(dtype))
        assert torch.equal(compression.decompress(message, ctx), message.float())
        whole, ctx = compression.compress(torch.arange(3))
        assert whole.dtype == compression.decompress(whole, ctx).dtype == torch.int64
    horovods = pytest.importorskip("horovod.torch").Compression
    assert torch.equal(horovods.fp16.compress(tensor)[0], hvd.Compression.fp16.compress(tensor)[0])


def wrapped_apart(**settings):
    """Two ranks that start from weights of their own, as most of Horovod's own tests do; and theirs of before."""
    comms, models = dgcopt.simulated_world(2), []
    for seed in range(2):
        torch.manual_seed(seed)
        models.append(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)))
    before = [[weight.detach().clone() for weight in model.parameters()] for model in models]
    optimizers = [
        hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), comm=comm, **settings
        )
        for model, comm in zip(models, comms, strict=True)
    ]
    return models, optimizers, before


@pytest.mark.parametrize("every", [0, 1])
def test_ranks_that_start_apart_train_on_where_horovods_do(every: int, caplog: pytest.LogCaptureFixture):
    models, optimizers, before = wrapped_apart(check_replicas_every=every)
    optimizers[1].param_groups[0]["lr"] = 0.2
    for model in models:
        model(torch.ones(1, 4)).sum().backward()
    mean = [(one.grad + two.grad) / 2 for one, two in zip(*(m.parameters() for m in models), strict=True)]
    for optimizer in optimizers:
        optimizer.step()
    for model, weights, lr in zip(models, before, (0.1, 0.2), strict=True):
        for now, weight, grad in zip(model.parameters(), weights, mean, strict=True):
            torch.testing.assert_close(now.detach(), weight - lr * grad)
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    for rank in range(2):
        mine = [text for text in told if f"rank {rank}: replicas have come apart" in text]
        assert ["come apart before the first step" in text for text in mine] == [True, *[False] * every]
        assert any(f"seen on rank {rank}" in text and "lr of parameter group 0" in text for text in told)


def test_ranks_that_start_apart_are_an_error_if_asked_and_elsewhere():
    for make in (hvd.DistributedOptimizer, dgcopt.DistributedOptimizer):
        models, optimizers, _ = wrapped_apart(on_divergence="raise")
        if make is dgcopt.DistributedOptimizer:
            comms = dgcopt.simulated_world(2)
            optimizers = [make(torch.optim.SGD(m.parameters()), comm=c) for m, c in zip(models, comms, strict=True)]
        for model in models:
            model(torch.ones(1, 4)).sum().backward()
        with pytest.raises(dgcopt.DivergenceError, match="before the first step"):
            optimizers[0].step()


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


def test_every_name_of_horovod_is_there_or_says_what_to_use():
    horovods = pytest.importorskip("horovod.torch", reason="Horovod is not installed: its names cannot be listed")
    names = {
        name for name, value in vars(horovods).items() if not isinstance(value, types.ModuleType) and name[0] != "_"
    }
    names -= {"check_extension"}  # which is no part of its interface, but left over from its own import
    assert names >= {"allreduce_async_", "nccl_built", "join"} and names - set(hvd.__all__) == set(INSTEAD)
    assert hvd.elastic is horovods.elastic


@pytest.mark.parametrize("name", INSTEAD)
def test_names_that_are_missing_say_what_to_use(name: str):
    assert not hasattr(hvd, name)
    with pytest.raises(AttributeError, match=rf"no '{name}'.*(dgcopt\.join\(optimizer\)|torch\.)"):
        getattr(hvd, name)


def test_elastic_without_horovod(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "horovod.torch", None)
    with pytest.raises(AttributeError, match=r"Horovod cannot be imported.*dgcopt\.checkpoint\.load"):
        _ = hvd.elastic


def test_elastic_over_another_wire(alone):
    with pytest.raises(AttributeError, match=r"go over local here.*dgcopt\.elastic\.State"):
        _ = hvd.elastic


@pytest.mark.parametrize("wire", ["torch", "mpi", "local"])
def test_built_and_enabled_libraries_are_reported(wire: str, monkeypatch: pytest.MonkeyPatch):
    """Before and after joining; Horovod's answers are its own."""
    monkeypatch.setenv("DGCOPT_WIRE", wire)
    assert hvd.gloo_built() == torch.distributed.is_gloo_available() and hvd.gloo_enabled() == (wire == "torch")
    assert hvd.mpi_enabled() == (wire == "mpi") and hvd.cuda_built() == (torch.version.cuda is not None)
    assert hvd.rocm_built() == (torch.version.hip is not None) and not hvd.ddl_built() and not hvd.ccl_built()
    assert bool(hvd.nccl_built()) == torch.distributed.is_nccl_available()
    assert all(type(getattr(hvd, name)()) is (int if name == "nccl_built" else bool) for name in BUILT)


def test_mpi_is_not_asked_about_threads_where_it_is_not_used(alone):
    with pytest.raises(ValueError, match="over local"):
        hvd.mpi_threads_supported()


def test_horovod_is_asked_where_it_is_the_wire(monkeypatch: pytest.MonkeyPatch):
    horovods = pytest.importorskip("horovod.torch", reason="Horovod is not installed")
    monkeypatch.setenv("DGCOPT_WIRE", "horovod")
    for name in BUILT:
        if name.endswith("_built"):  # the others are answered once Horovod runs
            assert getattr(hvd, name)() == getattr(horovods, name)(), name
