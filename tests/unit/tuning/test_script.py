"""A script runs unchanged until its optimizer has taken some steps; one that cannot be measured is a sentence."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import optimizer as torch_hooks

from dgcopt import ConfigError
from dgcopt.__main__ import main
from dgcopt.tuning.profile import Profile
from dgcopt.tuning.script import run_script

TRAIN = """
import os, sys, time
import torch
from torch import nn


class Pause(torch.autograd.Function):
    @staticmethod
    def forward(ctx, signal):
        return signal.clone()

    @staticmethod
    def backward(ctx, signal):
        time.sleep(0.05)
        return signal


def train(steps, wrap=lambda optimizer, model: optimizer):
    first, last = nn.Linear(4, 3), nn.Linear(3, 2)
    model = nn.ModuleDict({"first": first, "last": last, "unused": nn.Linear(1, 1)})
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(steps):
        optimizer.zero_grad()
        last(Pause.apply(first(torch.randn(2, 4)))).square().mean().backward()
        optimizer.step()
        scheduler.step()
        time.sleep(0.02)
"""


@pytest.fixture
def script(tmp_path: Path) -> Any:
    def write(text: str) -> Path:
        (tmp_path / "training.py").write_text(TRAIN)
        path = tmp_path / "script.py"
        path.write_text(f"from training import *\n{text}\n")
        return path

    yield write
    sys.modules.pop("training", None)


def profile_of(path: Path, *arguments: str, steps: int = 6) -> Profile:
    return run_script(path, arguments, lambda profile, device: profile, steps)


@pytest.mark.parametrize(
    "call",
    [
        "train(100)",
        "import dgcopt; dgcopt.init('local')\n"
        "train(100, lambda optimizer, model: dgcopt.DistributedOptimizer(optimizer, model.named_parameters()))",
    ],
)
def test_a_step_is_measured_to_each_gradient_and_no_further(call: str, script: Any) -> None:
    profile = profile_of(script(call))
    assert [*profile.shapes.values()] == [(3, 4), (3,), (2, 3), (2,), (1, 1), (1,)]
    first, _, last, *_, unused = profile.ready.values()
    assert 0.02 <= last <= first - 0.05 and unused == profile.seconds == max(profile.ready.values())
    assert not torch_hooks._global_optimizer_pre_hooks and not torch_hooks._global_optimizer_post_hooks


def test_the_script_sees_its_own_command_line_and_its_folder(script: Any, tmp_path: Path) -> None:
    before = sys.argv[:], sys.path[:]
    path = script("(open(os.path.dirname(__file__) + '/seen', 'w').write(' '.join([__name__, *sys.argv])), train(9))")
    profile_of(path, "--config", "a.yaml")
    assert (tmp_path / "seen").read_text() == f"__main__ {path} --config a.yaml"
    assert (sys.argv, sys.path) == before


def test_the_ranks_of_the_script_are_joined_until_the_answer_is_there(script: Any, tmp_path: Path) -> None:
    path = script("try:\n    train(9)\nfinally:\n    open(os.path.dirname(__file__) + '/left', 'w').close()")
    left = tmp_path / "left"
    assert run_script(path, (), lambda profile, device: left.exists(), 6) is False and left.exists()


def test_steps_of_other_optimizers_within_the_answer_or_within_a_step_are_none_of_the_scripts(script: Any) -> None:
    def recorded(profile: Profile, device: torch.device) -> Any:
        weight = torch.nn.Parameter(torch.zeros(1))
        weight.square().sum().backward()
        torch.optim.Adam([weight]).step()
        return weight.grad

    assert run_script(script("train(9)"), (), recorded, 6) is not None
    nested = """
class Outer(torch.optim.SGD):
    def step(self, closure=None):
        torch.optim.Adam(self.param_groups[0]['params']).step()


train(9, lambda optimizer, model: Outer(model.parameters(), lr=0.1))
"""
    assert profile_of(script(nested)).seconds > 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("pass", r"script.py ended before any optimizer of torch.optim had stepped: give the arguments with which"),
        ("sys.exit(2)", r"script.py exited \(2\) before any optimizer"),
        ("train(5)", r"script.py ended after 5 of 6 steps: let it train longer, or lower --steps \(at least 4\)"),
        ("train(2); train(2)", r"the script steps two optimizers, SGD and SGD: .* Give a script that trains one"),
        ("sgd = torch.optim.SGD([nn.Parameter(torch.zeros(1))])\nfor _ in range(9): sgd.step()", "no gradient arrived"),
        ("torch.optim.SGD([torch.zeros(1)]).step()", "the script's SGD has no parameter to train"),
        (
            "param = nn.Parameter(torch.zeros(1)); param.device_mesh = 1\ntorch.optim.SGD([param]).step()",
            "the script trains sharded parameters",
        ),
    ],
)
def test_a_script_that_cannot_be_measured(text: str, said: str, script: Any) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        profile_of(script(text))
    assert "\n" not in str(error.value)


def test_errors_of_the_script_and_of_the_answer_are_raised_although_the_script_handles_exceptions(script: Any) -> None:
    with pytest.raises(ZeroDivisionError):
        profile_of(script("1 / 0"))

    def refuse(profile: Profile, device: torch.device) -> None:
        raise ConfigError("told afterwards")

    handling = script("while True:\n    try:\n        train(100)\n    except Exception:\n        pass")
    with pytest.raises(ConfigError, match="told afterwards"):
        run_script(handling, (), refuse, 6)


def test_a_script_that_handles_even_its_end_ends_at_its_next_step(script: Any) -> None:
    assert profile_of(script("try:\n    train(9)\nexcept BaseException:\n    train(9)")).seconds > 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--script", "nowhere.py"), "there is no script nowhere.py"),
        (("--script",), "--script needs the path of a training script"),
        (("--steps", "3", "--script", "{}"), "--steps must be 4 or more, not 3: the first 3 are not timed"),
        (("--script", "{}", "--config", "9"), "this process is the only one: start several, as by"),
    ],
)
def test_the_command_tells_bad_input(
    words: tuple[str, ...], said: str, script: Any, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    path = script("assert sys.argv[1:] == ['--config', '9'], sys.argv\ntrain(99)")
    monkeypatch.setattr(sys, "argv", ["dgcopt", "doctor", *(word.format(path) for word in words)])
    assert main() == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert said in line
