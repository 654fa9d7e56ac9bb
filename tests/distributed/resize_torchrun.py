"""Agents of torchrun on one machine: a second one joins while the first trains, and dies while both do.

    python resize_torchrun.py SCRIPT DIRECTORY PORT

Each stage is awaited in what the agents print; a file tells the script in the end that it is enough.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

script, directory, port = sys.argv[1], Path(sys.argv[2]), sys.argv[3]

AGENT = [sys.executable, "-m", "dgcopt", "run", "-np", "1", "--nnodes", "1:4", "--max-restarts", "9"]
AGENT += ["--rdzv-endpoint", f"localhost:{port}"]
# who is lost is missed after five seconds, and who may come is waited for one more
AGENT += [
    "--launcher-args=--monitor-interval 0.3 --rdzv-conf "
    "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=5"
]


def start(name: str) -> subprocess.Popen:
    log = (directory / f"{name}.log").open("w")
    return subprocess.Popen([*AGENT, script, str(directory)], stdout=log, stderr=log, start_new_session=True)


def children(pid: int) -> list[int]:
    """Processes that it has started."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def said(name: str) -> str:
    return (directory / f"{name}.log").read_text()


def wait_for(name: str, words: str, more: int = 1) -> None:
    """Until an agent's ranks have printed words so many times."""
    deadline = time.monotonic() + 60
    while said(name).count(words) < more:
        if time.monotonic() > deadline or agents[0].poll() is not None:
            raise SystemExit(f"agent {name} did not say {words!r} in time")
        time.sleep(0.1)


agents = [start("first")]
try:
    wait_for("first", "of 1 goes on from step 0")
    wait_for("first", "committed", 2)
    agents.append(start("second"))
    wait_for("first", "of 2 goes on from step")
    before = said("first").count("committed")
    wait_for("first", "committed", before + 1)
    lost = [agents[1].pid, *children(agents[1].pid)]  # listed first: a worker outlives its agent
    for pid in lost:
        os.kill(pid, signal.SIGKILL)
    wait_for("first", "of 1 goes on from step", 2)
    (directory / "enough").touch()
    code = agents[0].wait(60)
finally:
    for agent in agents:
        if agent.poll() is None:
            os.killpg(agent.pid, signal.SIGKILL)
    for path in sorted(directory.glob("*.log")):
        print(f"== {path.stem}\n{path.read_text()}", flush=True)
sys.exit(code)
