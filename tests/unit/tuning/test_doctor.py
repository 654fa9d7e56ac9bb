"""A model's step is measured, and bad input is one sentence; diagnoses need ranks: see the scenarios of collectives."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dgcopt import ConfigError, init, shutdown, simulated_world
from dgcopt.__main__ import main
from dgcopt.tuning.advise import Prediction, recipes_of
from dgcopt.tuning.commands import diagnosis
from dgcopt.tuning.doctor import Diagnosis, diagnose, profile_model
from dgcopt.tuning.models import Model
from dgcopt.tuning.profile import Profile
from dgcopt.tuning.wire import Fitted


class Pause(torch.autograd.Function):
    """Backward takes known seconds."""

    @staticmethod
    def forward(ctx: Any, signal: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return signal.clone()

    @staticmethod
    def backward(ctx: Any, signal: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return signal, None


class Slow(nn.Module):
    """Forward takes 0.05 s, backward 0.1 s between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 3), nn.Linear(3, 2)
        self.unused = nn.Linear(1, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        time.sleep(0.05)
        hidden: Tensor = Pause.apply(self.first(inputs), 0.1)
        return self.last(hidden)


@pytest.mark.usefixtures("clock")
def test_a_step_is_measured_to_each_gradient() -> None:
    profile = profile_model(Slow(), [torch.randn(2, 4)])
    assert profile.seconds == pytest.approx(0.15)
    assert profile.ready["first.weight"] - profile.ready["last.weight"] == pytest.approx(0.1)
    assert profile.ready["unused.weight"] == profile.seconds
    model = profile.model("slow")
    assert model.numel == 4 * 3 + 3 + 3 * 2 + 2 + 2
    assert model.seconds == profile.seconds


def test_a_profile_keeps_its_ready_times_as_a_model() -> None:
    profile = Profile({"a": (5,), "b": (7,), "c": (9,)}, {"c": 0.4, "b": 0.5, "a": 0.9}, 1.0)
    found = [(one.numel, one.ready) for one in profile.model("toy").parameters()]
    assert found == [(9, pytest.approx(0.4)), (7, pytest.approx(0.5)), (5, pytest.approx(1.0))]


@pytest.mark.usefixtures("clock")
def test_the_fastest_step_counts() -> None:
    class Slower(nn.Linear):
        steps = 0

        def forward(self, inputs: Tensor) -> Tensor:
            self.steps += 1
            time.sleep((0.0, 0.2, 0.05, 0.2)[self.steps - 1])  # the first one allocates memory, and does not count
            return super().forward(inputs)

    assert profile_model(Slower(2, 2), [torch.randn(1, 2)], steps=3).seconds == pytest.approx(0.05)


def test_gradients_stay_none_and_hooks_are_removed() -> None:
    model = Slow()
    profile_model(model, [torch.randn(2, 4)], steps=1)
    assert all(param.grad is None and not param._post_accumulate_grad_hooks for param in model.parameters())


class Refusing(nn.Linear):
    """Raises an error of its own for any input."""

    def __init__(self, error: Exception) -> None:
        super().__init__(1, 1)
        self.error = error

    def forward(self, inputs: Tensor) -> Tensor:
        raise self.error


@pytest.mark.parametrize(
    ("model", "inputs", "said"),
    [
        (nn.Linear(4, 2), torch.randn(2, 5), r"does not take an input of shape \(2, 5\).*Correct --batch, --input"),
        (nn.Embedding(4, 2), torch.randn(2, 5), r"does not take an input of shape \(2, 5\)"),
        (nn.Embedding(4, 2), torch.tensor([4]), r"shape \(1,\): IndexError: .*Correct --batch, --input or --vocab"),
        (
            nn.ModuleDict({"a": nn.Linear(1, 1)}),
            torch.ones(1),
            r"NotImplementedError: Module \[ModuleDict\] is missing",
        ),
        (nn.Bilinear(1, 1, 1), torch.ones(1), r"missing 1 required positional argument: 'input2'\. Name .* --script"),
        (Refusing(KeyError("a")), torch.ones(1), r"KeyError: 'a'\. Correct"),
        (Refusing(AssertionError()), torch.ones(1), r"AssertionError:\. Correct"),
        (Refusing(AttributeError("no x")), torch.ones(1), r"AttributeError: no x\. Correct"),
    ],
)
def test_inputs_that_do_not_fit(model: nn.Module, inputs: Tensor, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        profile_model(model, [inputs])
    assert "\n" not in str(error.value)


def test_a_model_without_trained_outputs() -> None:
    class Constant(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            return inputs

    with pytest.raises(ConfigError, match="output does not depend on a trained parameter"):
        profile_model(Constant(2, 2), [torch.randn(1, 2)])


def test_a_model_may_return_a_dataclass() -> None:
    @dataclass
    class Output:
        logits: Tensor
        steps: int = 1

    class Classifier(nn.Linear):
        def forward(self, inputs: Tensor) -> Any:
            return Output(super().forward(inputs))

    assert profile_model(Classifier(2, 2), [torch.randn(1, 2)], steps=1).seconds > 0


def doctor(*words: str) -> int:
    argv, sys.argv = sys.argv, ["dgcopt", "doctor", *words]
    init("local")
    try:
        return main()
    finally:
        sys.argv = argv
        shutdown()


LINEAR = ("--model", "torch.nn:Linear(4, 2)", "--input")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--model", "torch.nn:Linear(4, 2)", "--input", "4"), "this process is the only one: start several, as by"),
        (
            ("--model", "torch.nn:Linear(4, 2, dtype=__import__('torch').bfloat16)", "--input", "4"),
            "this process is the only one",
        ),
        (("--model", "torch.nn:Linaer(4, 2)"), "'torch.nn' has no 'Linaer'"),
        (("--model", "resnet50"), "must be module:callable"),
        (("--model", "torch.nn:Linear(4, 2)", "--input", "5"), "the model does not take an input of shape (32, 5)"),
        (("--model", "torch.nn:Linear(4, 2)", "--input", "4", "--batch", "0"), "--batch must be 1 or more, not 0"),
        (("--model", "torch.nn:Linear(4, 2)", "--input", "4", "--vocab", "0"), "--vocab must be 1 or more, not 0"),
        (
            (*LINEAR, "4", "--batch", "9" * 18),
            "no input of shape (999999999999999999, 4) can be made (Storage size calc",
        ),
        ((*LINEAR, "9" * 20), "lower --batch, --input or --vocab"),
        ((*LINEAR, "4", "--vocab", "9" * 20), "lower --batch, --input or --vocab"),
        ((*LINEAR, "4", "--steps", "5"), "--steps would have no effect without --script"),
        (("--vocab", "5", "--batch", "3", "--script", "a.py"), "--batch, --vocab would have no effect with --script"),
        ((*LINEAR, "4", "--seconds", "nan"), "--seconds must be a positive number, not nan"),
        ((*LINEAR, "4", "--deadline", "inf"), "--deadline must be a positive number, not inf"),
        ((*LINEAR, "4", "--candidates", "nope"), "unknown candidate 'nope': choose from "),
        (
            (*LINEAR, "4", "--allow", "lossy"),
            "no dense exchange is allowed to compare with: allow 'exact' or 'rounded'",
        ),
        (("--script",), "--script needs the path of a training script"),
    ],
)
def test_bad_input_is_one_sentence(words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor(*words) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert said in line


def test_a_shape_is_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        doctor("--model", "torch.nn:Linear(4, 2)", "--input", "3x4")
    assert "'3x4' is not a shape: write 3,224,224" in capsys.readouterr().err


def test_the_text_has_compute_exposed_communication_and_a_choice() -> None:
    predictions = [Prediction("DDP bf16", "rounded", 0.5, 0.3, 10.0), Prediction("DDP fp32", "exact", 0.8, 0.6, 20.0)]
    found = Diagnosis(Model("toy", {"a": (4,)}, [1.0], 0.2), Fitted(), [], predictions, "local steps: 1 ms")
    text = diagnosis(found, 4, 2, ["exact", "rounded"])
    assert "toy: 4 parameters; 4 ranks on 2 machine(s)" in text
    assert "forward and backward 0.2000 s; DDP fp32 exposes 0.6000 s of communication" in text
    assert text.splitlines()[-1].startswith("does not pay: DDP bf16 takes 500 ms a step")
    assert text.splitlines()[-2] == "local steps: 1 ms"


def test_an_unknown_candidate_is_refused_before_ranks_meet() -> None:
    """The other rank has not come: a collective would fail."""
    profile = Profile({"a": (5,)}, {"a": 0.4}, 1.0)
    with pytest.raises(ConfigError, match=r"unknown candidate 'DGCC\(\)'"):
        diagnose(simulated_world(2)[0], "toy", profile, names=["DGCC()"])


def test_a_candidate_that_needs_machines_is_refused_without() -> None:
    with pytest.raises(
        ConfigError, match="'Hierarchical\\(BF16\\(\\)\\)' needs several machines of several ranks each"
    ):
        recipes_of({"a": (5,)}, ["Hierarchical(BF16())"])
