"""The hook's memory: conserved, saved and restored, and refused for another model or rank."""

import io
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

import dgcopt

from .registry import Scenario, registered_in
from .training import RATIO, Branches, OddMemory, Training, assert_close, local_gradient, mean, plain, small_model

SCENARIOS: dict[str, Scenario] = {}
scenario = registered_in(SCENARIOS)


class Muted(Branches):
    """Both branches are always used, but in most steps the second one's gradient is zero on all ranks."""

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.trunk(inputs).tanh()
        self.calls += 1
        return self.always(hidden) + self.rarely(hidden) * float(self.calls % 3 == 1)


@scenario
def what_is_not_sent_is_kept() -> None:
    for model in (small_model, Muted, OddMemory):
        training = Training(dgcopt.DGC(RATIO), plain, attach=False, model=model)
        start, gradients = training.weights(), 0.0
        for step in range(6):
            gradients = gradients + local_gradient(training.model, step)
            training.step(step)
        assert training.memory().abs().sum() > 0
        assert_close((start - training.weights()) / 0.1 + mean(training.memory()), mean(gradients), 1e-5)


@scenario
def a_frozen_layer_keeps_its_residual() -> None:
    """DDP is made anew when a layer is frozen, and when it is trained again: with the same state, or a stored one."""
    for how in ({"named": True}, {"attach": False}, {"attach": False, "stored": True, "named": True}, {"stored": True}):
        is_stored = how.pop("stored", False)
        training = Training(dgcopt.DGC(RATIO), plain, bucket_cap_mb=25, **how)
        start, gradients = training.weights(), 0.0
        for step in range(9):
            if step in (3, 6):
                training.model[2].requires_grad_(step == 6)
                training.optimizer.zero_grad()
                again = pickle.loads(pickle.dumps(training.state)) if is_stored else training.state
                optimizer = training.optimizer if is_stored and "attach" not in how else None
                names = training.model.named_parameters() if "named" in how else None
                training.state, hook = dgcopt.ddp_hook(again, optimizer, names)
                training.ddp = DDP(training.model, bucket_cap_mb=25)
                training.ddp.register_comm_hook(training.state, hook)
            gradients = gradients + local_gradient(training.model, step)
            training.step(step)
        assert_close((start - training.weights()) / 0.1 + mean(training.memory()), mean(gradients), 1e-5)


@scenario
def pickled_state_continues_with_the_same_bits() -> None:
    # scales of int8 and int2 depend on what shares a bucket, which stays as it is where DDP looks for unused parameters
    for compressor, how in (
        (dgcopt.DGC(RATIO), {"named": True}),
        (dgcopt.DGC(RATIO, overlap=True), {}),
        (dgcopt.DGC(RATIO), {"attach": False}),
        (dgcopt.DGC.compact(RATIO, warmup=None), {"find_unused_parameters": True}),
        (dgcopt.FP16(), {}),
    ):
        training, file = Training(compressor, **how).run(4), io.BytesIO()
        parts = {"model": training.model, "optimizer": training.optimizer}
        torch.save({"hook": training.state, **{name: part.state_dict() for name, part in parts.items()}}, file)
        there = training.run(4, first=4).weights()
        file.seek(0)
        saved = torch.load(file, weights_only=False)
        again = Training(saved["hook"], **how)
        again.model.load_state_dict(saved["model"])
        again.optimizer.load_state_dict(saved["optimizer"])
        assert torch.equal(again.run(4, first=4).weights(), there), (compressor, how)
        assert again.state.step == 8


@scenario
def state_of_another_compressor_is_sent() -> None:
    """What DGC held back comes with the gradient of one of the next steps, where nothing is held back any more."""
    before = Training(dgcopt.DGC(RATIO), plain).run(3)
    held = mean(before.memory())
    ours, theirs = (Training(dgcopt.NoCompression(), plain) for _ in range(2))
    for other in (ours, theirs):
        other.model.load_state_dict(before.model.state_dict())
    ours.state.load_state_dict(before.state.state_dict())
    for step in range(3, 9):
        ours.step(step)
        theirs.step(step)
        if not mean(ours.memory().abs()).any():
            break
        assert_close(ours.weights(), theirs.weights())
    assert held.any() and step < 7
    assert_close(ours.gradients(), theirs.gradients() + held)


@scenario
def state_of_another_rank_is_refused() -> None:
    training = Training(dgcopt.DGC(RATIO)).run(2)
    state = {**training.state.state_dict(), "rank": 1 - dist.get_rank()}
    other = Training(dgcopt.DGC(RATIO))
    other.state.load_state_dict(state)
    with pytest.raises(dgcopt.ConfigError, match=r"belongs to rank \d of 2 .* Let every rank save"):
        other.step(0)


@scenario
def state_of_another_model_is_refused() -> None:
    state = Training(dgcopt.DGC(RATIO)).run(2).state.state_dict()
    other = Training(dgcopt.DGC(RATIO), model=OddMemory)
    other.state.load_state_dict(state)
    with pytest.raises(dgcopt.ConfigError, match=r"knows parameter 'group0\.parameter0' with shape .*build the same"):
        other.step(0)


@scenario
def a_state_that_lacks_a_part_changes_nothing() -> None:
    training = Training(dgcopt.DGC(RATIO)).run(2)
    before = training.memory()
    for key in training.state.state_dict().keys() - {"format"}:
        with pytest.raises(dgcopt.ConfigError, match=f"this state lacks {key}, which ddp_hook saves"):
            training.state.load_state_dict(
                {k: v for k, v in Training(dgcopt.DGC()).state.state_dict().items() if k != key}
            )
        assert training.state.step == 2 and torch.equal(training.memory(), before)
