"""Scripts as Horovod's documentation teaches them, run with dgcopt on every wire, and with Horovod alone."""

import functools
import math
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.launching import PROGRAMS, ROOT, WIRES, Outcome, launch, missing

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]

RUN = str(PROGRAMS / "run_examples.py")
EXAMPLES = ("mnist_style", "gradient_clipping", "accumulation", "gan", "adasum", "mixed_precision")
STOCK: dict[str, tuple[str, ...]] = {
    # Adasum needs Horovod's MPI controller; Horovod's optimizer refuses the loops of `gan` and `mixed_precision`
    "horovod-gloo": ("mnist_style", "gradient_clipping", "accumulation"),
    "horovod-mpi": ("mnist_style", "gradient_clipping", "accumulation", "adasum"),
}
PLAN: dict[str, dict[str, tuple[str, ...]]] = {
    "torch": {"dgcopt": EXAMPLES},
    "mpi": {"dgcopt": EXAMPLES},
    "horovod-gloo": {
        "stock": STOCK["horovod-gloo"],
        "beside": ("mnist_style", "gan", "mixed_precision"),
        "dgcopt": EXAMPLES,
    },
    "horovod-mpi": {"stock": STOCK["horovod-mpi"], "beside": ("gan", "adasum"), "dgcopt": EXAMPLES},
}
RUNS = [(wire, library, name) for wire in WIRES for library, names in PLAN[wire].items() for name in names]


@functools.cache
def outcome_of(wire: str) -> tuple[Outcome, dict[str, dict[str, Any]]]:
    """One launch for all that is planned on the wire, and what rank 0 told of each."""
    words = [word for library, names in PLAN[wire].items() for word in (f"--{library}", *names)]
    outcome = launch(wire, 2, [RUN, *words], limit=200)
    return outcome, {result["example"]: result for result in outcome.told("example")}


def result_of(wire: str, library: str, name: str) -> dict[str, Any]:
    if missing(wire):
        pytest.skip(missing(wire))
    outcome, results = outcome_of(wire)
    ran = f"{name} --{library}"
    assert ran in results, f"{ran} did not come to its end over {wire}:\n{outcome.tail}"
    return results[ran]


@pytest.mark.parametrize(("wire", "library", "name"), RUNS)
def test_learns(wire: str, library: str, name: str) -> None:
    result = result_of(wire, library, name)
    assert math.isfinite(result["loss"])
    if name == "gan":
        assert result["loss"] < 0.5, "the generator's centre is still far from 3"
    else:
        assert result["accuracy"] > 0.85
    if name == "gradient_clipping":
        assert result["clipped"] > 20
    if name == "accumulation":
        assert result["steps"] == 4 * math.ceil(90 / 7)
    if name == "mixed_precision":
        assert result["scales"] == [512.0, 512.0], "one overflow on one rank halves both ranks' scales, once"


@pytest.mark.parametrize(
    ("wire", "library", "name"), [(w, lib, n) for w, lib, n in RUNS if lib != "stock" and n in STOCK.get(w, ())]
)
def test_ends_where_horovod_alone_ends(wire: str, library: str, name: str) -> None:
    assert abs(result_of(wire, library, name)["loss"] - result_of(wire, "stock", name)["loss"]) < 1e-4


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_wire_ends_alike(name: str) -> None:
    losses = {wire: result_of(wire, "dgcopt", name)["loss"] for wire in WIRES if not missing(wire)}
    assert max(losses.values()) - min(losses.values()) < 1e-4, losses


@pytest.mark.parametrize("wire", WIRES)
def test_ends(wire: str) -> None:
    """Leaving Python leaves the wire."""
    result_of(wire, "dgcopt", "mnist_style")
    outcome, _ = outcome_of(wire)
    assert outcome.code == 0 and not outcome.orphans, outcome.tail


GUIDE = (ROOT / "docs" / "migration.md").read_text()
AROUND = """
import torch
torch.manual_seed(1)
model = torch.nn.Linear(4, 3)
loader = [(torch.randn(5, 4), torch.randint(3, (5,))) for _ in range(3)]
loss_fn = torch.nn.functional.cross_entropy
before = model.weight.detach().clone()
{code}
assert not torch.equal(next(model.parameters()), before)
print("came to the end of {name}", flush=True)
"""


@pytest.mark.parametrize(
    ("wire", "without", "count"), [("torch", "horovod.torch", 6), ("horovod-gloo", "DistributedDataParallel", 7)]
)
def test_blocks_of_the_migration_guide(wire: str, without: str, count: int, tmp_path: Path) -> None:
    if missing(wire):
        pytest.skip(missing(wire))
    blocks = [code for code in re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL) if without not in code]
    assert len(blocks) == count
    blocks.sort(key=lambda code: "init_process_group" not in code)  # dgcopt takes what is there; torch refuses to
    for number, code in enumerate(blocks):
        (tmp_path / f"block{number}.py").write_text(AROUND.format(code=code, name=f"block {number}"))
    paths = [str(tmp_path / f"block{number}") for number in range(len(blocks))]
    outcome = launch(wire, 2, [RUN, *paths], limit=100, compiler=wire == "torch")
    for number, code in enumerate(blocks):
        assert outcome.output.count(f"came to the end of block {number}") == 2, f"{code}\n{outcome.tail}"
    assert outcome.code == 0 and not outcome.orphans, outcome.tail
