"""`dgcopt.init(survive=True)`: requirements and refusals."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import pytest
import torch.distributed as dist

import dgcopt
from dgcopt.comm.epoch_groups import EpochGroups
from dgcopt.comm.membership import MEMBER, STORE, Epoch, Status, gone_key
from dgcopt.comm.surviving import SurvivingComm
from dgcopt.errors import CommError, ConfigError


def test_without_a_launcher_it_has_no_effect() -> None:
    assert dgcopt.init(survive=True).wire == "local"


@pytest.mark.parametrize(
    "settings, environment, problem",
    [
        ({"min_ranks": 0}, {}, "min_ranks"),
        ({"survive": 1}, {}, "survive"),
        ({"wire": "mpi"}, {}, "wire 'torch' and one connection"),
        ({"streams": 2}, {STORE: "127.0.0.1:1"}, "wire 'torch' and one connection"),
        ({}, {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, f"lacks {STORE}, {MEMBER}"),
        ({}, {STORE: "127.0.0.1:1", MEMBER: "0.0.0"}, "lacks RANK, WORLD_SIZE"),
    ],
)
def test_refused(
    settings: dict[str, Any], environment: dict[str, str], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=problem):
        dgcopt.init(**{"survive": True, **settings})


def test_a_store_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the host and the remedy."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {STORE: f"127.0.0.1:{port}", MEMBER: "0.0.0", "RANK": "0", "WORLD_SIZE": "1"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(CommError, match=f"the store at 127.0.0.1:{port} does not answer .* first agent"):
        dgcopt.init(survive=True, deadline=1.0)


def test_a_process_that_has_left_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others would not take it in: it would wait for them until the deadline."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    server.set(gone_key("0.0.0"), "left")
    environment = {STORE: f"127.0.0.1:{server.port}", MEMBER: "0.0.0", "RANK": "0", "WORLD_SIZE": "1"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"0\.0\.0: this process has left the job by dgcopt\.shutdown\(\)"):
        dgcopt.init(survive=True, deadline=2.0)


class Store:
    """A store without any key."""

    def another(self) -> None:
        return None

    def get(self, key: str) -> str | None:
        return "killed" if key.endswith("gone/b") and self.is_b_gone else None

    is_b_gone = False


@pytest.mark.parametrize("end", ["another rank left", "a rank died", "well"])
def test_an_epoch_that_ends_while_its_groups_are_built(end: str) -> None:
    """It does not begin: if another rank has left, whose thread may go on to build; or at once if one has died."""
    groups: Any = object.__new__(EpochGroups)
    groups._store, groups._connected, groups._for_groups = Store(), 3, None
    waits = threading.Event()

    def group(*_: Any) -> str:
        if end == "another rank left":
            groups._connected = None
        elif end == "a rank died":
            groups._store.is_b_gone = True
            waits.wait(30)
        return "group"

    groups._group = group
    start = time.monotonic()
    try:
        if end == "well":
            assert groups.build(Epoch(3, ("a", "b"), ("", ""), 0), "", {"control": ["a", "b"]}) == {"control": "group"}
            return
        with pytest.raises(CommError, match="left epoch 3"):
            groups.build(Epoch(3, ("a", "b"), ("", ""), 0), "", {"control": ["a", "b"]})
        assert time.monotonic() - start < 20
    finally:
        waits.set()


def test_a_rank_whose_state_cannot_be_sent_trains_on(caplog: pytest.LogCaptureFixture) -> None:
    """It ended in the error of the process that came back; and after it each of the others."""
    comm: Any = object.__new__(SurvivingComm)

    def give(pair: Any) -> None:
        raise ConfigError("it holds a set")

    comm.rank, comm._me, comm.give, comm._pair = 0, Status("a", 0, ""), give, lambda epoch: None
    comm._hand_over(Epoch(3, ("a", "b"), ("", ""), 0, ("b",)))
    assert "could not give its state to a new rank: it holds a set" in caplog.text
