"""Compressors as hooks of torch's DistributedDataParallel, in two real processes: a launch, a test per scenario."""

import functools
import math
import re
from pathlib import Path

import pytest

from tests.distributed.scenarios.catalogue import IN_DDP
from tests.support.launching import PROGRAMS, ROOT, Outcome, assert_ended, assert_passed, launch, missing

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]


@functools.cache
def outcome() -> Outcome:
    if missing("torch"):
        pytest.skip(missing("torch"))
    env = {"DGCOPT_TEST_JOIN_FIRST": "torch"}
    return launch("torch", 2, [str(PROGRAMS / "worker.py"), *IN_DDP], limit=300, env=env, compiler=True)


@pytest.mark.parametrize("name", IN_DDP)
def test_scenario(name: str) -> None:
    assert_passed("torch", 2, outcome(), name)


def test_ends() -> None:
    assert_ended(outcome())


@pytest.mark.parametrize("framework", ["lightning", "accelerate"])
def test_learns_in(framework: str) -> None:
    pytest.importorskip(framework)
    if missing("torch"):
        pytest.skip(missing("torch"))
    run = launch("torch", 2, [str(ROOT / "examples" / f"{framework}_ddp.py")], limit=120, compiler=True)
    told = run.told("example")
    assert run.code == 0 and not run.orphans and len(told) == 2, run.tail
    assert told[0] == told[1], "replicas drifted apart"
    assert told[0]["steps"] == 10 * math.ceil(1437 / 2 / 32), "the hook was not called in every step"
    assert told[0]["accuracy"] > 0.85 and told[0]["ratio"] > 8


GUIDE = (ROOT / "docs" / "ddp.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
AROUND = """
import torch
torch.manual_seed(1)
model = torch.nn.Linear(400, 300)
loader = [(torch.randn(5, 400), torch.randint(300, (5,))) for _ in range(3)]
loss_fn = torch.nn.functional.cross_entropy
{code}
ddp_model(inputs).sum().backward()
assert saved["hook"].step == 4 and saved["hook"].telemetry.ratio > 50
dist.destroy_process_group()
print("came to the end", flush=True)
"""


def test_blocks_of_the_guide(tmp_path: Path) -> None:
    if missing("torch"):
        pytest.skip(missing("torch"))
    whole = [code for code in BLOCKS if "DistributedDataParallel(model)" in code]
    assert len(whole) == 2
    script = tmp_path / "guide.py"
    script.write_text(AROUND.format(code="\n".join(whole)))
    run = launch("torch", 2, [str(script)], limit=60, compiler=True)
    assert run.code == 0 and run.output.count("came to the end") == 2, run.tail
