"""State and checkpoints of another format are refused, with the format, the place and the remedy."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dgcopt
from dgcopt import DGC, CheckpointError, ConfigError, checkpoint
from dgcopt.version import FORMAT
from tests.support.worlds import same, small_model

REFUSED = rf"this state has format {{}}; dgcopt {dgcopt.__version__} reads format {FORMAT}\. Load it with"


def compressed() -> Any:
    model, comm = small_model(), dgcopt.simulated_world(2)[0]
    return dgcopt.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), compression=DGC(0.1), comm=comm)


def averaged() -> Any:
    model, comm = small_model(), dgcopt.simulated_world(2)[0]
    return dgcopt.LocalSGD(2).attach(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), comm)


def hooked() -> Any:
    return dgcopt.ddp_hook(DGC(0.1))[0]


PLACES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "DistributedOptimizer": (compressed, lambda state: state["dgcopt"]),
    "LocalSGD": (averaged, lambda state: state["averaging"]["dgcopt"]),
    "ddp_hook": (hooked, lambda state: state),
}


@pytest.mark.parametrize("make, entry", PLACES.values(), ids=PLACES)
def test_state_of_another_format_is_refused_before_anything_changes(
    make: Callable[[], Any], entry: Callable[[Any], Any]
) -> None:
    owner = make()
    before = copy.deepcopy(owner.state_dict())
    owner.load_state_dict(before)
    for format in (FORMAT + 1, None):
        state = copy.deepcopy(before)
        entry(state)["format"] = format
        entry(state)["step"] = 7
        with pytest.raises(ConfigError, match=REFUSED.format(format)):
            owner.load_state_dict(state)
    assert same(owner.state_dict(), before)


def test_state_without_any_key_that_is_known_is_refused_alike() -> None:
    """A layout that has nothing in common with this one is no KeyError."""
    for make, entry in list(PLACES.values()):
        state = (owner := make()).state_dict()
        entry(state).clear()
        with pytest.raises(ConfigError, match=REFUSED.format(None)):
            owner.load_state_dict(state)


def test_a_checkpoint_of_another_format_names_the_version_that_wrote_it(tmp_path: Path) -> None:
    comm = dgcopt.simulated_world(1)[0]
    manifest = checkpoint.save(tmp_path, {"epoch": 1}, 1, comm) / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": FORMAT + 1, "dgcopt": "9.0"}))
    match = rf"manifest\.json has format {FORMAT + 1}, written by dgcopt 9\.0; dgcopt \S+ reads format {FORMAT}\. Load"
    with pytest.raises(CheckpointError, match=match):
        checkpoint.load(tmp_path, comm)
