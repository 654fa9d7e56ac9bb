"""A small sample of the faults that scripts/inject_faults.py injects: each is noticed, and nothing is lost."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from launching import ROOT, WIRES, missing

LIMIT = 280
"""Seconds on a machine that does much else; about 15 where it does not."""


@pytest.mark.processes
@pytest.mark.parametrize("wire", [*WIRES, "simulated"])
def test_sample(wire: str, tmp_path: Path) -> None:
    if wire != "simulated" and missing(wire):
        pytest.skip(missing(wire))
    table = tmp_path / "faults.json"
    command = [sys.executable, str(ROOT / "scripts" / "inject_faults.py"), "--quick", "--wires", wire]
    done = subprocess.run([*command, "--json", str(table)], capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr
    *rows, everything = json.loads(table.read_text())["table"]
    assert {row["kind"] for row in rows} >= {"not-finite", "disagreement", "payload"}
    assert everything["handled"] == everything["injected"] >= 10
