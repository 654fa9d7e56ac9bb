"""What a probe says before it measures; measurements need ranks: see the scenarios of collectives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dgcopt import ConfigError, init, shutdown, simulated_world
from dgcopt.__main__ import main
from dgcopt.collectives import Collective
from dgcopt.comm import Handle
from dgcopt.comm.simulated import SimulatedComm, simulate
from dgcopt.tuning.commands import probe_table
from dgcopt.tuning.probe import measurements, probe
from dgcopt.tuning.wire import Fitted, fit


def test_a_single_rank_is_told_to_start_others(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    comm = init("local")
    try:
        with pytest.raises(ConfigError, match="this process is the only one: start several, as by `torchrun"):
            probe(comm)
        monkeypatch.setattr("sys.argv", ["dgcopt", "probe"])
        assert main() == 2
        assert "dgcopt probe: dgcopt probe measures the link between ranks" in capsys.readouterr().err
    finally:
        shutdown()


def test_the_first_rank_of_each_machine_has_the_link_to_itself_as_in_hierarchical(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    comms, senders = simulated_world(4, nodes=2), set()

    def noting(comm: SimulatedComm, start: Callable[[Collective], Handle]) -> Callable[[Collective], Handle]:
        def note(collective: Collective) -> Handle:
            if collective.group == "across":
                senders.add(comm.rank)
            return start(collective)

        return note

    for comm in comms:
        monkeypatch.setattr(comm, "start", noting(comm, comm.start))
    sizes = {"AllReduce": [1024, 4096]}
    found = simulate([measurements(comm, sizes, 0.01, torch.device("cpu")) for comm in comms], comms)  # type: ignore[misc]
    assert senders == {0, 2}
    assert all(("AllReduce", "across") in one.fits for one in found)  # type: ignore[attr-defined]


def test_a_table_has_a_line_for_each_collective() -> None:
    table = probe_table(Fitted({("AllReduce", "world"): fit([1000, 2_000_000], [0.001, 0.201], 4)}))
    (_, line) = table.splitlines()
    assert line.split() == ["AllReduce", "world", "4", "0.900", "100.05", "2", "MB"]
