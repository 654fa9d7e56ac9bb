"""The exchange inside frameworks, in a single process; tests/distributed/test_integrations.py has the frameworks."""

import copy
import logging
import os
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.optim import SGD

import dgcopt
from dgcopt.exchange.held import unwrapped
from dgcopt.flat.optimizer_state import entries_in
from dgcopt.gradients.synchronised import synchronised
from dgcopt.integrations.exchange import Exchange, keep_gradients_local, read


def test_a_method_of_another_kind_is_refused() -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(dgcopt.ConfigError, match="method must be a compressor"):
        Exchange(model, [SGD(model.parameters(), lr=0.1)], 0.01)  # type: ignore[arg-type]


def test_each_optimizer_takes_a_copy_of_the_compressor_and_its_own_parameters() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    method = dgcopt.DGC(0.1)
    exchange = Exchange(model, [SGD(layer.parameters(), lr=0.1) for layer in model], method)
    first, second = exchange.optimizers
    copies = [first.compressor, second.compressor]  # type: ignore[attr-defined]
    assert repr(copies[0]) == repr(copies[1]) == repr(method)
    assert copies[0] is not copies[1] and method not in copies
    names = [synchronised(optimizer).names.values() for optimizer in (first, second)]  # type: ignore[union-attr]
    assert [sorted(of) for of in names] == [["0.bias", "0.weight"], ["1.bias", "1.weight"]]


def test_a_single_process_needs_no_ddp() -> None:
    model = nn.Linear(3, 2)
    assert keep_gradients_local(model) is model


def test_gradients_in_the_buckets_of_ddp_are_refused(tmp_path: Path) -> None:
    """A gradient that is DDP's own view of a bucket would point to the first result, past that bucket."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        for is_view in (False, True):
            model = nn.parallel.DistributedDataParallel(nn.Linear(3, 2), gradient_as_bucket_view=is_view)
            with pytest.raises(dgcopt.ConfigError, match="False") if is_view else nullcontext():
                keep_gradients_local(model)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    "module",
    ["accelerate.optimizer", "lightning.fabric.wrappers", "lightning_fabric.wrappers", "pytorch_lightning.core"],
)
def test_an_optimizer_is_found_in_the_wrapper_of_a_framework_but_of_no_other(module: str) -> None:
    inner = SGD(nn.Linear(3, 2).parameters(), lr=0.1)
    wrapper = type("Wrapper", (), {"__module__": module, "optimizer": inner})()
    other = type("Wrapper", (), {"__module__": "mine", "optimizer": inner})()
    assert unwrapped(wrapper) is inner and unwrapped(other) is other and unwrapped(inner) is inner


def test_a_missing_part_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "dgcopt"):
        assert read(tmp_path / "nothing") == {}
    assert "starts from zero" in caplog.text


def test_parts_of_another_checkpoint_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As where a run is killed between the framework's files and the parts, or one without dgcopt wrote these files."""
    model, states, weights = nn.Linear(3, 2), [], []
    bare = SGD(model.parameters(), lr=0.1, momentum=0.9)
    exchange = Exchange(model, [bare], dgcopt.LocalSGD(every=2))
    for step in range(2):
        model(torch.ones(1, 3)).sum().backward()
        bare.step()
        if step == 0:
            exchange.save(tmp_path, 0)
        states.append(copy.deepcopy(bare.state_dict()))
        weights.append(model.weight.detach().clone())
    without = {key: states[1][key] for key in ("state", "param_groups")}
    rerun = copy.deepcopy(states[0])
    for _, held in entries_in(rerun):
        held["run"] = "another"
    for state, own in ((states[0], True), (states[1], False), (rerun, False), (without, False)):
        caplog.clear()
        model.weight.data.fill_(5.0)
        exchange.use(read(tmp_path))
        bare.load_state_dict(copy.deepcopy(state))
        assert torch.equal(model.weight, weights[0] if own else torch.full((2, 3), 5.0))
        assert ("of another checkpoint" in caplog.text) != own
        momentum = bare.state[model.weight]["momentum_buffer"]
        assert torch.equal(momentum, state["state"][0]["momentum_buffer"])


def test_rank_0s_state_of_averaging_without_parts(tmp_path: Path) -> None:
    """Its memory fits no other rank, so all start without; not once averaging has begun."""
    exchanges, states = [], []
    for _ in range(2):
        model = nn.Linear(3, 2)
        exchanges.append(Exchange(model, [SGD(model.parameters(), lr=0.1, momentum=0.9)], dgcopt.DiLoCo(every=2)))
        states.append(exchanges[0].optimizers[0].state_dict())
        if not states[1:]:
            model(torch.ones(1, 3)).sum().backward()
            exchanges[0].optimizers[0].step()
    for _, held in entries_in(states[1]):
        held["world_size"] = 2
    begun, fresh = exchanges
    for exchange in exchanges:
        exchange.use(read(tmp_path / "nothing"))
    fresh.optimizers[0].load_state_dict(copy.deepcopy(states[1]))
    assert len(fresh.optimizers[0].state_dict()["state"]) == 2, "of momentum"
    with pytest.raises(dgcopt.CheckpointError, match="has trained with DiLoCo, and the checkpoint has no ranks' parts"):
        begun.optimizers[0].load_state_dict(copy.deepcopy(states[1]))
    begun.optimizers[0].load_state_dict(states[0])


def test_the_frameworks_own_file_is_the_state_of_a_single_process(tmp_path: Path) -> None:
    """As where it is killed after the parts were written, and before the framework's files."""
    model = nn.Linear(3, 2)
    bare = SGD(model.parameters(), lr=0.1, momentum=0.9)
    exchange, states = Exchange(model, [bare], dgcopt.DGC(0.1)), []
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()
        bare.step()
        states.append(copy.deepcopy(bare.state_dict()))
    exchange.save(tmp_path, 0)
    exchange.use(read(tmp_path))
    bare.load_state_dict(copy.deepcopy(states[0]))
    assert torch.equal(bare.state[model.weight]["momentum_buffer"], states[0]["state"][0]["momentum_buffer"])


@pytest.mark.parametrize("resumes", [False, True])
def test_parts_of_averaged_ranks_are_left_out_by_a_compressor(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, resumes: bool
) -> None:
    model = nn.Linear(3, 2)
    averaged, bare = (SGD(model.parameters(), lr=0.1, momentum=0.9) for _ in range(2))
    saving = Exchange(model, [averaged], dgcopt.LocalSGD(every=2))
    model(torch.ones(1, 3)).sum().backward()
    averaged.step()
    saving.save(tmp_path, 0)
    of_rank_0 = copy.deepcopy(averaged.state_dict())
    of_rank_0["state"][0]["momentum_buffer"].fill_(7.0)
    bare.load_state_dict(of_rank_0)  # as Trainer does before a method is attached
    exchange = Exchange(model, [bare], dgcopt.TopK(0.1))
    model.weight.data.fill_(5.0)
    if resumes:
        exchange.resume(read(tmp_path))
    else:
        exchange.use(read(tmp_path))
        bare.load_state_dict(of_rank_0)
    exchange.load_weights()
    assert bool((model.weight == 5.0).all()) and bool((bare.state[model.weight]["momentum_buffer"] == 7.0).all())
    assert "resumes from the weights and the optimizer's state of rank 0" in caplog.text


@patch.dict(os.environ)  # Fabric sets torchrun's variables
def test_an_optimizer_is_found_in_fabrics_checkpoints_however_many_were_set_up_before(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")
    strategy = dgcopt.integrations.fabric.DGCStrategy(dgcopt.DGC(0.1), process_group_backend="gloo")
    fabric = lightning.Fabric(accelerator="cpu", devices=1, strategy=strategy)
    fabric.launch()
    states = []
    for _ in range(2):
        model = nn.Linear(3, 2)
        model, optimizer = fabric.setup(model, SGD(model.parameters(), lr=0.1))
        states.append({"model": model, "optimizer": optimizer})
    fabric.save(tmp_path / "last.ckpt", states[1])
    first = read(f"{tmp_path / 'last.ckpt'}.dgcopt/optimizer")
    assert len(first["optimizers"]) == 1, "as in a process that sets up the second model only"
    torch.distributed.destroy_process_group()


def test_each_model_that_accelerate_has_prepared_has_a_folder_in_its_checkpoints(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    exchanges = []
    for folders in (["dgcopt", "dgcopt_2"], ["dgcopt"]):
        for _ in folders:
            model = nn.Linear(3, 2)
            prepared, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=0.1))
            exchanges.append(dgcopt.integrations.accelerate.attach(accelerator, prepared, optimizer, dgcopt.DGC(0.1)))
        accelerator.save_state(str(tmp_path / str(len(folders))))
        assert sorted(path.name for path in (tmp_path / str(len(folders))).glob("dgcopt*")) == folders
        accelerator.free_memory()  # earlier exchanges live on
