"""The agent of `dgcopt run --survive`: ranks that die are started anew, within limits."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from dgcopt.launcher.agent import Agent, Plan


def run_agent(script: str, ranks: int = 2, **settings: float) -> int:
    return Agent(Plan([sys.executable, "-S", "-c", script], ranks, **settings)).run()


def test_an_agent_starts_the_dead_anew(tmp_path: Path) -> None:
    """It alone, under another name; the job ends well if the one that was started anew does."""
    script = RANK + (
        f"folder = pathlib.Path({str(tmp_path)!r}); (folder / name).touch()\n"
        "if rank == 1 and name.endswith('.0'): os.kill(os.getpid(), signal.SIGKILL)\n"
        "import time\n"
        "while not (folder / '0.1.1').exists(): time.sleep(0.01)\n"
    )
    assert run_agent(script, 3) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.0.0", "0.1.0", "0.1.1", "0.2.0"]


def test_an_agent_gives_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A rank that never comes to train is started three times; the exit status is its own."""
    script = RANK + (
        f"folder = pathlib.Path({str(tmp_path)!r}); (folder / name).touch()\n"
        "import time\n"
        "while rank == 0 and not (folder / '0.1.2').exists(): time.sleep(0.01)\n"
        "if rank == 0: time.sleep(0.3)\n"
        "sys.exit(7 * rank)\n"
    )
    assert run_agent(script) == 7
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.0.0", "0.1.0", "0.1.1", "0.1.2"]
    assert "0.1.2 ended with 7, as 3 starts in a row" in caplog.text


def test_a_rank_that_comes_back_after_the_end_is_not_waited_for(tmp_path: Path) -> None:
    """Nobody is left to take it in, so it would wait until its deadline, and end the job with an error."""
    script = RANK + (
        f"file = pathlib.Path({str(tmp_path)!r}) / 'back'\n"
        "import time\n"
        "if name == '0.1.0': sys.exit(1)\n"
        "if rank == 1: file.touch(); time.sleep(60)\n"
        "while not file.exists(): time.sleep(0.01)\n"
    )
    start = time.monotonic()
    assert run_agent(script) == 0
    assert time.monotonic() - start < 30


def test_all_ranks_are_lost(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """Nobody has the state any more: the agent ends, as restarted ranks would wait for it."""
    together = f"open(os.path.join({str(tmp_path)!r}, str(os.getpid())), 'w').close()\n"
    together += f"while len(os.listdir({str(tmp_path)!r})) < 2: time.sleep(0.001)\n"
    assert run_agent(f"import os, signal, time\n{together}os.kill(os.getpid(), signal.SIGKILL)") == 128 + 9
    assert "all ranks are lost" in caplog.text


def test_an_agent_ends_its_ranks() -> None:
    """SIGTERM to the agent is one to each rank, none of which is started anew."""
    program = [sys.executable, "-m", "dgcopt", "run", "--survive", "-np", "2", "sh", "-c", "echo up; exec sleep 60"]
    process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    for _ in range(2):
        process.stdout.readline()
    start = time.monotonic()
    process.terminate()
    assert process.wait(20) == 128 + 15
    assert time.monotonic() - start < 9


RANK = "import os, pathlib, signal, sys; name, rank = os.environ['DGCOPT_MEMBER'], int(os.environ['RANK'])\n"
