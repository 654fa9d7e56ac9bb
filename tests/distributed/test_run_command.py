"""`dgcopt run` with two real ranks of each launcher, and on two machines that an ssh of our own stands for."""

import os
import re
from pathlib import Path

import pytest

from tests.support.launching import ROOT, free_port, launch, missing

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]

SCRIPT = """
import os, sys
names = ("RANK", "HOROVOD_RANK", "OMPI_COMM_WORLD_RANK")
rank = next(os.environ[name] for name in names if name in os.environ)
print(f"rank {rank} has {os.environ['OMP_NUM_THREADS']} threads and {sys.argv[1:]}", flush=True)
sys.exit(7 if sys.argv[1] == "fail" and rank == "1" else 0)
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "train.py").write_text(SCRIPT)
    return str(tmp_path / "train.py")


@pytest.mark.parametrize(
    ("launcher", "wire", "prefix"),
    [
        ("torchrun", "torch", "[{}] "),
        ("horovodrun", "horovod-gloo", "[{}]<stdout>:"),
        ("mpirun", "mpi", "{}]<stdout>: "),
    ],
)
def test_two_ranks(launcher: str, wire: str, prefix: str, script: str) -> None:
    """Each rank's lines begin with its number; the exit status is the launcher's own."""
    if missing(wire):
        pytest.skip(missing(wire))
    run = ["-m", "dgcopt", "run", "--launcher", launcher, "-np", "2", "--threads", "1", script]
    well = launch(wire, 2, [*run, "well"], limit=60, bare=True)
    assert well.code == 0 and not well.orphans, well.tail
    for rank in range(2):
        assert f"{prefix.format(rank)}rank {rank} has 1 threads and ['well']" in well.output, well.tail
    failed = launch(wire, 2, [*run, "fail"], limit=60, bare=True)
    assert failed.code == (7 if launcher == "mpirun" else 1) and not failed.orphans, failed.tail


def test_survivors() -> None:
    """One of two ranks is killed: it alone is started anew and joins the other, whose process goes on."""
    if missing("torch"):
        pytest.skip(missing("torch"))
    script = [str(ROOT / "examples" / "survive.py"), "--steps", "20", "--kill-at", "8"]
    outcome = launch("torch", 2, ["-m", "dgcopt", "run", "--survive", "-np", "2", *script], limit=120, bare=True)
    assert outcome.code == 0 and not outcome.orphans, outcome.tail
    begun = dict(re.findall(r"(\S+) begins at step (\d+)", outcome.output))
    assert {*begun} == {"0.0.0", "0.1.0", "0.1.1"}, outcome.tail
    assert begun["0.0.0"] == begun["0.1.0"] == "0" and int(begun["0.1.1"]) > 8, outcome.tail
    assert "0.1.0 ended with -9 and is restarted" in outcome.output
    ends = re.findall(r"ends with (.*)", outcome.output)
    assert len(ends) == 2 and len({*ends}) == 1, outcome.tail


def test_two_machines(script: str, tmp_path: Path) -> None:
    """Other addresses of this one, with an ssh that runs the command it is given."""
    if missing("torch"):
        pytest.skip(missing("torch"))
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text('#!/bin/bash\necho "ssh to ${@: -2:1}"\nexec bash -c "${@: -1}"\n')
    ssh.chmod(0o755)
    hosts = ["-H", "127.0.0.2:1,127.0.0.3:1", "--rdzv-endpoint", f"127.0.0.2:{free_port()}"]
    run = ["-m", "dgcopt", "run", *hosts, script, "well", "an argument with 'quotes'"]
    path = os.pathsep.join([str(ssh.parent), os.environ["PATH"]])
    outcome = launch("torch", 2, run, limit=90, env={"PATH": path}, bare=True)
    assert outcome.code == 0 and not outcome.orphans, outcome.tail
    for rank in range(2):
        assert f"ssh to 127.0.0.{rank + 2}" in outcome.output
        assert f"""[{rank}] rank {rank} has 1 threads and ['well', "an argument with 'quotes'"]""" in outcome.output
