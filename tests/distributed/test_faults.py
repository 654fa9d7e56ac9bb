"""A small sample of the faults that scripts/inject_faults.py injects: each is noticed, and nothing is lost."""

import itertools
import json
from pathlib import Path

import inject_faults
import pytest

import dgcopt
from tests.distributed.faults import forked, launches, networks
from tests.support.launching import WIRES, missing

pytestmark = [pytest.mark.processes, pytest.mark.timeout(280)]


@pytest.mark.parametrize("wire", [*WIRES, "simulated"])
def test_sample(wire: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if wire != "simulated" and missing(wire):
        pytest.skip(missing(wire))
    table = tmp_path / "faults.json"
    code = inject_faults.main(["--quick", "--kinds", "launches", "--wires", wire, "--json", str(table)])
    assert code == 0, capsys.readouterr()
    *rows, everything = json.loads(table.read_text())["table"]
    assert {row["fault"] for row in rows} >= {*itertools.islice(launches.LABELS.values(), 3)}
    assert everything["handled"] == everything["injected"] >= 10


def test_forked_ranks_inherit_no_wire() -> None:
    """Another test of this process may have left one joined, over which each rank would be alone."""
    dgcopt.init("local")
    try:
        reports = forked.run(2, lambda rank, tell: tell(size=dgcopt.init(deadline=20.0).size), 60.0)
    finally:
        dgcopt.shutdown()
    assert [report.told for report in reports] == [{"size": 2}] * 2


@pytest.mark.parametrize("kind", ["disks", "broadcasts", "networks", "exceptions", "messages", "processes", "sharded"])
def test_sample_without_launchers(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "faults.json"
    code = inject_faults.main(["--quick", "--kinds", kind, "--json", str(table)])
    assert code == 0, capsys.readouterr()
    *_, everything = json.loads(table.read_text())["table"]
    if kind == "networks" and networks.missing():
        pytest.skip(networks.missing())
    assert everything["handled"] == everything["injected"] == inject_faults.KINDS[kind].QUICK
