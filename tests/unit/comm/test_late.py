"""Ranks that are late or gone, found after a failure: in a store of this process, and by groups that refuse to send."""

import socket
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dgcopt import CommError
from dgcopt.comm import late
from dgcopt.comm.torch import TorchComm


def test_every_rank_that_waits_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their deadlines do not pass at once: a rank asks until it knows of all others, or for `NOTICE` seconds."""
    store = dist.HashStore()
    group: Any = SimpleNamespace(get_group_store=lambda: store)
    found: dict[int, Any] = {}

    def wait(rank: int, others: list[int]) -> None:
        found[rank] = late.waiting(group, rank, others, f"bucket {rank}")

    monkeypatch.setattr(late, "NOTICE", 30.0)
    wait(1, [])
    first = threading.Thread(target=wait, args=(0, [1, 2]))
    first.start()
    first.join(0.1)
    wait(2, [0, 1])
    first.join()
    monkeypatch.setattr(late, "NOTICE", 0.3)
    wait(3, [0, 4])  # rank 4 has not begun to wait
    assert found == {
        0: {1: "bucket 1", 2: "bucket 2"},
        1: {},
        2: {0: "bucket 0", 1: "bucket 1"},
        3: {0: "bucket 0"},
    }


def test_a_rank_is_gone_if_no_group_reaches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed collective closes connections of its own group, to live ranks too."""
    monkeypatch.setattr(late, "NOTICE", 0.05)
    reached = {("failed", 0), ("other", 0), ("other", 1)}  # rank 2 by neither

    def isend(message: Any, rank: int, group: Any, tag: int) -> None:
        if (group, rank) not in reached or not message.is_cpu:
            raise RuntimeError("connection closed by peer")

    monkeypatch.setattr(dist, "isend", isend)
    groups: Any = ["failed", "other"]
    assert late.gone(groups, {7: 0, 8: 1, 9: 2}) == [9]
    assert late.gone(groups, {7: 0, 8: 1}) == []
    with torch.device("meta"):  # a default device is not followed
        assert late.gone(groups, {7: 0, 8: 1}) == []
    assert late.gone([], {9: 2}) == []


def test_a_program_that_is_no_store_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a server of another job at MASTER_PORT, which takes connections and never answers."""
    monkeypatch.setattr("dgcopt.comm.torch.LATER", 0.0)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(CommError, match=rf"rank 1 of 2: not all ranks came to {place} within 0.5 s"):
            TorchComm(init_method=place, rank=1, size=2, deadline=0.5)
