"""What a user is told who has mixed something up, or should know something before it costs accuracy."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dgcopt
from dgcopt.compressors import HorovodCompression, accept
from dgcopt.errors import ConfigError
from dgcopt.exchange.step import Aborted
from tests.support.worlds import Ranks, small_model


def sgd(params: Any) -> torch.optim.SGD:
    return torch.optim.SGD(params, lr=0.1)


class Net(nn.Module):
    """Unlike nn.Sequential it cannot be iterated over."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)


# -- arguments in the wrong place ------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [dgcopt.DGC(), dgcopt.DGC, dgcopt.FP16(dgcopt.TopK())], ids=["DGC()", "DGC", "FP16"])
def test_a_compressor_in_the_place_of_the_names(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"second argument.*DistributedOptimizer\(optimizer, model\.named_parameters"):
        dgcopt.DistributedOptimizer(sgd(Net().parameters()), given)
    with pytest.raises(ConfigError, match=r"named_parameters should be .*not .*(DGC|FP16)\. "):
        dgcopt.ddp_hook(dgcopt.DGC(), named_parameters=given)


def test_a_model_or_its_parameters_in_the_place_of_the_names() -> None:
    for model in (Net(), small_model()):
        for given in (model, model.parameters(), list(model.parameters()), dict(model.named_parameters())):
            with pytest.raises(ConfigError, match=r"tuples \(name, parameter\).*model\.named_parameters\(\)"):
                dgcopt.DistributedOptimizer(sgd(model.parameters()), given)


# -- optimizers inside a framework's wrapper -------------------------------------------------------------------------


def accelerated(optimizer: torch.optim.Optimizer) -> Any:
    accelerate = pytest.importorskip("accelerate")
    return accelerate.Accelerator(cpu=True).prepare(optimizer)


def fabrics(optimizer: torch.optim.Optimizer) -> Any:
    fabric = pytest.importorskip("lightning.fabric")
    made = fabric.Fabric(accelerator="cpu", devices=1)
    return made.setup(Net(), optimizer)[1]


def lightnings(optimizer: torch.optim.Optimizer) -> Any:
    pl = pytest.importorskip("lightning.pytorch")
    module, made = pl.LightningModule(), pl.core.optimizer.LightningOptimizer(optimizer)
    module.trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    made._strategy = module.trainer.strategy
    made._strategy.connect(module)
    return made


class Watches(dgcopt.NoCompression):
    """Counts the steps around which it is called."""

    attached: Any = None
    steps = 0

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        self.attached = optimizer

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.steps += 1


@pytest.mark.parametrize("wrap", [accelerated, fabrics, lightnings])
def test_the_hook_takes_a_frameworks_optimizer_for_the_one_inside(wrap: Any) -> None:
    model = Net()
    inside = sgd(model.parameters())
    state, _ = dgcopt.ddp_hook(Watches(), outside := wrap(inside), comm=dgcopt.simulated_world(2)[0])
    assert state.compressor.attached is inside
    outside.step()
    assert state.compressor.steps == 1
    model.layer(torch.ones(1, 3)).sum().backward()
    with pytest.raises(ConfigError, match=r"DDP has not called the hook.*register_comm_hook\(state, hook\)"):
        outside.step()


@pytest.mark.parametrize("wrap", [accelerated, fabrics, lightnings])
def test_a_frameworks_optimizer_is_not_wrapped_itself(wrap: Any) -> None:
    with pytest.raises(ConfigError, match=r"around SGD.*optimizer\.optimizer.*dgcopt\.ddp_hook"):
        dgcopt.DistributedOptimizer(wrap(sgd(Net().parameters())))


def test_a_hook_without_its_state() -> None:
    _, hook = dgcopt.ddp_hook(dgcopt.DGC())
    with pytest.raises(ConfigError, match=r"register_comm_hook\(\*dgcopt\.ddp_hook\(\.\.\.\)\), not None"):
        hook(None, None)


def test_names_of_another_model() -> None:
    with pytest.raises(ConfigError, match=r"2 parameter\(s\) of the optimizer were not named.*another model's\?"):
        dgcopt.DistributedOptimizer(sgd(Net().parameters()), Net().named_parameters())


def test_objects_other_than_optimizers_are_refused() -> None:
    class Around(torch.optim.Optimizer):
        """Never calls torch's own constructor."""

        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer, self.param_groups = optimizer, optimizer.param_groups

    for wrong in (Net().parameters(), Net(), Around(sgd(Net().parameters()))):
        for wrap in (dgcopt.DistributedOptimizer, lambda wrong: dgcopt.ddp_hook(dgcopt.DGC(), wrong)):
            with pytest.raises(ConfigError, match=rf"{type(wrong).__name__} is no torch\.optim\.Optimizer"):
                wrap(wrong)


# -- other libraries' compressors ------------------------------------------------------------------------------------


class LikeGrace:
    """The interface of GRACE's compressors."""

    def compress(self, tensor: Tensor, name: str) -> tuple[list[Tensor], Any]:
        return [tensor], None

    def decompress(self, tensors: list[Tensor], ctx: Any) -> Tensor:
        return tensors[0]


class LikeDGC(LikeGrace):
    """The interface of the original DGC's compressor."""

    def communicate(self, tensor_compressed: Any, name: str, op: Any) -> Any: ...


class LikeHorovods:
    """The interface of Horovod's compressors, and with `name` of those that came with the original DGC."""

    @staticmethod
    def compress(tensor: Tensor, name: str | None = None) -> tuple[Tensor, Any]:
        return tensor.half(), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor.to(ctx)


def name_of(given: object) -> str:
    """Without the address of an object, which differs from process to process."""
    return given.__name__ if isinstance(given, type) else f"{type(given).__name__}()"


@pytest.mark.parametrize("given", [LikeGrace(), LikeDGC(), LikeGrace, LikeDGC], ids=name_of)
def test_compressors_of_another_interface_are_refused_at_wrapping(given: Any) -> None:
    words = r"compress\(tensor\).*subclass dgcopt\.Compressor.*docs/compressors\.md"
    with pytest.raises(ConfigError, match=words):
        dgcopt.DistributedOptimizer(sgd(Net().parameters()), compression=given)
    with pytest.raises(ConfigError, match=words):
        dgcopt.ddp_hook(given)


@pytest.mark.parametrize("given", [LikeHorovods, LikeHorovods()], ids=name_of)
def test_compressors_of_horovods_interface_are_accepted(given: Any) -> None:
    assert isinstance(accept(given), HorovodCompression)
    ranks = Ranks(2, sgd, compression=given)
    ranks.step()
    ranks.assert_replicas_equal()


def test_a_compressor_that_makes_several_tensors_is_refused() -> None:
    """Its interface does not tell; the step does."""

    class Several(LikeHorovods):
        compress = staticmethod(lambda tensor: ((tensor, tensor), None))

    ranks = Ranks(2, sgd, compression=Several)
    ranks.backward()
    with pytest.raises(ConfigError, match=r"Several\.compress must return one tensor.*docs/compressors\.md"):
        ranks.optimizers[0].step()


# -- hints -----------------------------------------------------------------------------------------------------------


def said(caplog: pytest.LogCaptureFixture, part: str) -> list[int]:
    """The levels of the lines that contain a part."""
    return [record.levelno for record in caplog.records if part in record.getMessage()]


WITH_RATIO = [dgcopt.DGC, dgcopt.TopK, dgcopt.RandomK, dgcopt.CLTK, dgcopt.CSC, dgcopt.ChunkedTopK, dgcopt.DeMo]


@pytest.mark.parametrize("kind", WITH_RATIO)
def test_one_is_not_one_percent(kind: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "dgcopt")
    for ratio in (1, 1.0):
        Ranks(2, sgd, compression=dgcopt.FP16(kind(ratio)))
        assert said(caplog, f"{kind.__name__}: ratio 1 sends everything; 1% is 0.01") == [logging.WARNING] * 2
        caplog.clear()
    Ranks(2, sgd, compression=kind(0.5))
    assert not said(caplog, "sends everything")


def test_gradients_that_are_missing_from_adams_moments(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "dgcopt")
    hint = "Adam's moments are of the compressed mean"
    params = list(small_model().parameters())
    for optimizer, compressor, is_hinted in (
        (torch.optim.Adam(params), dgcopt.TopK(0.01), True),
        (torch.optim.Adam(params), dgcopt.FP16(dgcopt.DGC(0.01)), True),
        (torch.optim.Adam(params), dgcopt.PowerSGD(), False),
        (torch.optim.Adam(params), dgcopt.TopK(0.01, source="gradient"), False),
        (sgd(params), dgcopt.TopK(0.01), False),
    ):
        dgcopt.ddp_hook(compressor, optimizer)
        assert bool(said(caplog, hint)) == is_hinted, compressor
        caplog.clear()


# -- epochs of the ratio warm-up -------------------------------------------------------------------------------------


def test_the_length_of_an_epoch_is_told_to_the_copy() -> None:
    given = dgcopt.DGC(0.01, warmup=dgcopt.Warmup())
    ranks = Ranks(2, sgd, compression=given)
    given.set_steps_per_epoch(10)
    ranks.backward()
    with pytest.raises(ConfigError, match=r"took a copy.*optimizer\.compressor\.set_steps_per_epoch"):
        ranks.optimizers[0].step()
    ranks = Ranks(2, sgd, compression=dgcopt.DGC(0.01, warmup=dgcopt.Warmup()))
    for optimizer in ranks.optimizers:
        optimizer.compressor.set_steps_per_epoch(10)
    ranks.step()
    ranks.assert_replicas_equal()


# -- overflow --------------------------------------------------------------------------------------------------------


def overflow(ranks: Ranks) -> None:
    ranks.backward()
    next(ranks.models[1].parameters()).grad.view(-1)[0] = torch.nan


def test_nan_is_a_warning_once_and_a_scalers_overflow_is_none(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "dgcopt")
    ranks = Ranks(2, sgd)
    ranks.step()
    caplog.clear()
    overflow(ranks)
    for optimizer in ranks.optimizers:
        optimizer.step()
    assert sorted(record.levelno for record in caplog.records) == [logging.INFO, logging.WARNING], "one on each rank"
    assert said(caplog, "rank 1, step 1: the gradient of parameter '0.weight'") == [logging.WARNING]

    scaler = torch.amp.GradScaler("cpu")
    ranks = Ranks(2, sgd)
    for optimizer in ranks.optimizers:  # as the scaler asks for in its step
        assert not optimizer._step_supports_amp_scaling
    caplog.clear()
    overflow(ranks)
    scaler.scale(torch.ones(1))
    for optimizer in ranks.optimizers:
        scaler.unscale_(optimizer)
    for optimizer in ranks.optimizers:
        scaler.step(optimizer)
    assert {record.levelno for record in caplog.records} == {logging.INFO} and len(caplog.records) == 2


def test_scaled_gradients_of_simulated_ranks_are_refused() -> None:
    """The first rank to step sends the gradients of all, before the scalers of others have scaled theirs back."""
    ranks, scaler = Ranks(2, sgd), torch.amp.GradScaler("cpu", init_scale=1024.0)
    before = ranks.weights()
    ranks.backward()
    scaler.scale(torch.ones(1))
    with pytest.raises(ConfigError, match=r"rank 0: .*scaled.*scaler\.unscale_\(optimizer\) on every rank"):
        scaler.step(ranks.optimizers[0])
    for optimizer in ranks.optimizers:
        scaler.unscale_(optimizer)
    for optimizer in ranks.optimizers:
        scaler.step(optimizer)
    ranks.assert_replicas_equal()
    assert not any(torch.equal(old, new) for old, new in zip(before, ranks.weights(), strict=True))


def test_overflow_in_the_hook_is_a_warning_unless_there_is_a_scaler(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "dgcopt")
    for scaler, level in ((None, logging.WARNING), (torch.amp.GradScaler("cpu"), logging.INFO)):
        state, _ = dgcopt.ddp_hook(scaler=scaler, comm=dgcopt.simulated_world(2)[0])
        state._step.aborted(Aborted([1]))
        assert [record.levelno for record in caplog.records] == [level]
        caplog.clear()


# -- what an empty exchange costs ------------------------------------------------------------------------------------


def test_noop_costs_the_vote_and_says_so() -> None:
    assert "vote" in (dgcopt.Noop.__doc__ or "")
    ranks = Ranks(2, sgd, compression=dgcopt.Noop())
    ranks.step()
    telemetry, before = ranks.optimizers[0].telemetry, ranks.optimizers[0].telemetry.sent_bytes
    for _ in range(3):
        ranks.step()
    assert telemetry.sent_bytes - before == 3 * 44
