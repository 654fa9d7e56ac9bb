"""Trainer, Lightning, Fabric and Accelerate with dgcopt attached by their own objects, on two real ranks."""

import functools
import importlib.util
import math
from pathlib import Path
from typing import Any

import pytest

from tests.support.launching import PROGRAMS, Outcome, launch, missing

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]

NEEDS = {"trainer": "transformers", "lightning": "lightning", "fabric": "lightning", "accelerate": "accelerate"}
DENSE = 12 * (12 * 32 + 32 + 32 * 4 + 4) * 4
"""Bytes that two ranks' allreduce sends per rank in 12 steps."""


@functools.cache
def outcome(folder: Path) -> Outcome:
    """One launch for all frameworks that are installed."""
    installed = [name for name, package in NEEDS.items() if importlib.util.find_spec(package)]
    return launch("torch", 2, [str(PROGRAMS / "integrations.py"), str(folder), *installed], limit=300, compiler=True)


def launched(name: str, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The launch, where a framework can be tested."""
    if importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"{NEEDS[name]} is not installed")
    if missing("torch"):
        pytest.skip(missing("torch"))
    return outcome(tmp_path_factory.getbasetemp() / "integrations")


@pytest.mark.parametrize("method", ["NoCompression", "DGC", "LocalSGD"])
@pytest.mark.parametrize("name", NEEDS)
def test_trains_and_resumes(name: str, method: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Dense equals the framework's own averaging; the others train; a resumed run ends with the same bits."""
    run = launched(name, tmp_path_factory)
    told: list[dict[str, Any]] = [line for line in run.told("framework") if line["framework"] == name]
    ends = [line for line in told if line["method"] == method]
    assert run.code == 0 and not run.orphans and len(ends) == 2, run.tail
    first, other = ends
    assert first["weights"] == other["weights"] and math.isfinite(first["weights"]), "replicas drifted apart"
    assert first["resumed"] and other["resumed"]
    assert (first["from_own"] < 1e-6) == (method == "NoCompression")
    assert (first["sent"] < DENSE / 2) == (method != "NoCompression"), first["sent"]


@pytest.mark.parametrize("name", NEEDS)
def test_loads_and_trains_again(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Every load brings its own checkpoint, links included; a second loop of one object goes on from the first."""
    run = launched(name, tmp_path_factory)
    found = [line for line in run.told("further") if line.pop("further") == name]
    assert run.code == 0 and len(found) == 2, run.tail
    assert all(all(line.values()) for line in found), found
