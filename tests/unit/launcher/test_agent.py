"""The agent of `dgcopt run --survive`: ranks that die are started anew, within limits."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest

from dgcopt.comm.membership import MEMBER, state_key, trains_key
from dgcopt.errors import ConfigError
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


class Rank:
    """A process that ends by itself after some looks at it, or when it is told to."""

    def __init__(self, looks: float, code: int) -> None:
        self.looks, self.code = looks, code

    def poll(self) -> int | None:
        self.looks -= 1
        return self.code if self.looks < 0 else None

    def wait(self, timeout: float | None = None) -> int:
        return self.code

    def terminate(self) -> None:
        self.looks, self.code = 0, -signal.SIGTERM

    kill = terminate


@pytest.mark.parametrize(
    ("ranks", "keys", "code"),
    [
        ({"0.0.0": Rank(3, 0), "0.1.0": Rank(0, 1), "0.1.1": Rank(math.inf, 0)}, {}, 0),
        ({"0.0.0": Rank(3, 0), "0.1.0": Rank(math.inf, 0)}, {trains_key("0.1.0"): "no"}, 0),
        ({"0.0.0": Rank(3, 0), "0.1.0": Rank(9, 7)}, {trains_key("0.1.0"): "yes"}, 7),
        (
            {"0.0.0": Rank(0, 1), "0.0.1": Rank(9, 0), "0.1.0": Rank(3, 7), "0.1.1": Rank(math.inf, 0)},
            {trains_key("0.1.0"): "yes", state_key("0.0.1"): ""},
            0,
        ),
        (
            {"0.0.0": Rank(0, 1), "0.0.1": Rank(math.inf, 0), "0.1.0": Rank(3, 7)},
            {trains_key("0.1.0"): "yes"},
            7,
        ),
    ],
    ids=["started anew", "late", "trains", "has the state", "waits for the state"],
)
def test_a_rank_that_is_out_when_training_ends_is_ended(
    ranks: dict[str, Rank], keys: dict[str, str], code: int
) -> None:
    """Nobody is left to take it in: it waited until its deadline, and the job ended with "all ranks are lost"."""

    class Watched(Agent):
        def spawn(self, env: Mapping[str, str]) -> Rank:
            return ranks[env[MEMBER]]

    agent = Watched(Plan(["rank"], 2))
    for key, told in keys.items():
        agent._store.set(key, told)
    assert agent.run() == code
    assert [*ranks.values()][-1].code == (code or -signal.SIGTERM)


def test_machines_start_as_many_ranks_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise two have the same number, and all of them wait for the missing ones until their deadline."""
    first = Agent(Plan(["rank"], 4, 2))
    host, _, port = first.address.rpartition(":")
    told = "this machine has -np 2 --nnodes 2, and the first one has -np 4 --nnodes 2"
    with monkeypatch.context() as patch:
        patch.setattr("torch.distributed.TCPStore.add", lambda *_: pytest.fail("the next machine gets a number twice"))
        with pytest.raises(ConfigError, match=told):
            Agent(Plan(["rank"], 2, 2, (host, int(port)), hosts=False))
    assert Agent(Plan(["rank"], 4, 2, (host, int(port)), hosts=False)).address == first.address
    with pytest.raises(ConfigError, match="3 agents have come"):
        Agent(Plan(["rank"], 4, 2, (host, int(port)), hosts=False))


@pytest.mark.parametrize("machine", ["lost", "slower"])
def test_a_machine_that_is_lost_is_not_waited_for(
    machine: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Training has ended on the machine of the store, which waited for ever; but it waits for one that still trains."""

    class Watched(Agent):
        def spawn(self, env: Mapping[str, str]) -> Rank:
            self._store.set(trains_key(env[MEMBER]), "yes")
            return Rank(0 if self.plan.hosts else 50, 0)

    first = Watched(Plan(["rank"], 1, 2))
    host, _, port = first.address.rpartition(":")
    second = Watched(Plan(["rank"], 1, 2, (host, int(port)), hosts=False))
    monkeypatch.setattr("dgcopt.launcher.agent.PATIENCE", timedelta(seconds=0.5))
    monkeypatch.setattr("signal.signal", lambda *_: None)  # which is for the main thread only
    start = time.monotonic()
    with ThreadPoolExecutor() as pool:
        other = pool.submit(second.run) if machine == "slower" else None
        assert first.run() == 0 and (other is None or other.done())
    assert time.monotonic() - start < 30
    assert ("are not waited for" in caplog.text) == (machine == "lost")


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


def test_ranks_that_end_well_at_a_signal_have_not_trained_to_the_end(caplog: pytest.LogCaptureFixture) -> None:
    """They save a checkpoint and exit with 0: the launcher said that the job was done. None of them starts anew."""

    class Graceful(Rank):
        def terminate(self) -> None:
            self.looks, self.code = 0, 0

    class Watched(Agent):
        def spawn(self, env: Mapping[str, str]) -> Rank:
            return Told(math.inf, 0) if env[MEMBER] == "0.0.0" else made.pop()

    class Told(Graceful):
        def poll(self) -> int | None:
            os.kill(os.getpid(), signal.SIGTERM)
            return None

    made: list[Rank] = [Graceful(math.inf, 0)]
    assert Watched(Plan(["rank"], 2)).run() == 128 + 15
    made = [Rank(math.inf, 0)]
    assert Watched(Plan(["rank"], 2)).run() == 128 + 15
    assert "is restarted" not in caplog.text
    made = [Rank(0, 0)]  # which has trained to the end before the signal

    class Late(Watched):
        def spawn(self, env: Mapping[str, str]) -> Rank:
            return made.pop() if env[MEMBER] == "0.0.0" else Told(math.inf, 0)

    assert Late(Plan(["rank"], 2)).run() == 0


RANK = "import os, pathlib, signal, sys; name, rank = os.environ['DGCOPT_MEMBER'], int(os.environ['RANK'])\n"
