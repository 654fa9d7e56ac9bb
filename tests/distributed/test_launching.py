"""What is counted of launches, and that scenarios run where they are meant to, and nowhere else."""

import os
import subprocess
import sys
from pathlib import Path

import launching
import pytest
from launching import ABORTED, HERE, LEAN, ROOT, WORLDS, Outcome, Session, launch_of
from scenarios import FOUR_RANKS, ON_ALL_WIRES, names_of
from where import is_for, only


@pytest.mark.parametrize(("launches", "again", "too_often"), [(3, 1, False), (99, 2, True), (100, 2, False)])
def test_once_more_is_too_often(launches: int, again: int, too_often: bool) -> None:
    session = Session(launches, ["mpi"] * again)
    assert session.too_often is too_often
    assert f"{again} of {launches} launches" in str(session)


@pytest.mark.parametrize(("failed", "output", "again"), [(False, ABORTED, 1), (False, "", 0), (True, ABORTED, 0)])
def test_only_an_abort_of_horovod_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, failed: bool, output: str, again: int
) -> None:
    records = {"a": {0: {"error": "no"}}} if failed else {}
    outcomes = [Outcome(1, 2.0, output, [], records), Outcome(0, 2.0, "well", [])]
    monkeypatch.setattr(launching, "SESSION", Session())
    monkeypatch.setattr(launching, "missing", lambda wire: "")
    monkeypatch.setattr(launching, "launch", lambda *args, **more: outcomes.pop(0))
    if again:
        with pytest.warns(UserWarning, match="trying once more"):
            outcome = launching.launch_world("horovod-gloo", 2, ["worker.py"], limit=1)
    else:
        outcome = launching.launch_world("horovod-gloo", 2, ["worker.py"], limit=1)
    assert outcome.output == ("well" if again else output) and len(launching.SESSION.again) == again


@pytest.mark.parametrize(("processes", "again"), [(0, 1), (0, 2), (2, 2)])
def test_the_session_fails(tmp_path: Path, processes: int, again: int) -> None:
    """Though every test in it has passed, in one process or in those of pytest-xdist."""
    if processes:
        pytest.importorskip("xdist")
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (tmp_path / "test_it.py").write_text(
        "import pytest\nfrom launching import SESSION\n"
        "@pytest.mark.parametrize('launch', range(9))\n"
        f"def test_it(launch):\n    SESSION.launches += 1\n"
        f"    SESSION.again += [f'launch {{launch}}'] if launch < {again} else []\n"
    )
    how = ["-n", str(processes)] if processes else []
    command = [sys.executable, "-m", "pytest", str(tmp_path), *how]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HERE), str(LEAN), os.environ.get("PYTHONPATH", "")]),
    }
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert "9 passed" in run.stdout and "launch 0" in run.stdout, run.stdout + run.stderr
    assert f"{again} of 9 launches were made once more" in run.stdout
    assert run.returncode == again - 1, run.stdout


def test_a_scenario_is_where_it_is_for() -> None:
    @only(wires=["torch"], sizes=[4])
    def marked() -> None: ...

    def everywhere() -> None: ...

    assert is_for(everywhere, "mpi", 2) and is_for(marked, "torch", 4)
    assert not is_for(marked, "torch", 2) and not is_for(marked, "mpi", 4)
    run = {name for wire, size in WORLDS for name in names_of(wire, size)}
    assert run == {*ON_ALL_WIRES, *FOUR_RANKS}, "a scenario is run nowhere"
    assert "averaging: as_torchs_averager" not in names_of("mpi", 2)


def test_tests_of_one_launch_stay_together() -> None:
    wires = "tests/distributed/test_wires.py"
    assert launch_of(f"{wires}::test_scenario[horovod-gloo-4-library: DGC, hierarchical]") == f"{wires} horovod-gloo-4"
    assert launch_of(f"{wires}::test_ends[mpi-2]") == launch_of(f"{wires}::test_scenario[mpi-2-simulated: DGC]")
    assert launch_of("tests/test_train.py::TestPlaces::test_numbers") == "tests/test_train.py"
    trial = "tests/compatibility/test_compatibility.py::test_trial[Models: "
    assert launch_of(f"{trial}a, real ranks]") == launch_of(f"{trial}b, real ranks]") != launch_of(f"{trial}c]")
    assert launch_of("tests/unit/test_a.py::test_b[c]") == "tests/unit/test_a.py::test_b[c]"
