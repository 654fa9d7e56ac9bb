"""What a probe says before it measures; measurements need ranks: see the scenarios of collectives."""

from __future__ import annotations

import pytest

from dgcopt import ConfigError, init, shutdown
from dgcopt.__main__ import main
from dgcopt.tuning.commands import probe_table
from dgcopt.tuning.probe import probe
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


def test_a_table_has_a_line_for_each_collective() -> None:
    table = probe_table(Fitted({("AllReduce", "world"): fit([1000, 2_000_000], [0.001, 0.201], 4)}))
    (_, line) = table.splitlines()
    assert line.split() == ["AllReduce", "world", "4", "0.900", "100.05", "2", "MB"]
