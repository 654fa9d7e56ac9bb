"""The report: what it says about a run, and that a browser shows it without any other file."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dgcopt
from dgcopt import ConfigError
from dgcopt.__main__ import main
from dgcopt.exchange.trace import ROWS, Trace
from dgcopt.tuning.report import _rows, read_run, read_trace, write_report
from tests.support.worlds import Ranks

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
STEPS = 6


def history(folder: Path, losses: list[float], **more: float) -> Path:
    """A run's folder as train.py writes it."""
    folder.mkdir()
    entries = [
        {"step": 10 * (n + 1), "loss": loss, "seconds": 2.0 * (n + 1), "sent_bytes": 1e6, "ratio_fp32": 3.5, **more}
        for n, loss in enumerate(losses)
    ]
    entries.insert(1, {"step": 12, "note": "step 12: uses <BF16()>"})  # not a tag
    (folder / "history.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries) + '{"step": 99')
    return folder


@pytest.fixture
def traced(tmp_path: Path) -> Path:
    """A run with a trace of simulated ranks, which DGC has trained."""
    folder = history(tmp_path / "dgc", [2.0, 1.0, 0.5], residual_norm=0.1, skipped=0, wait_seconds=0.5)
    ranks = Ranks(2, lambda params: torch.optim.SGD(params, lr=0.1), compression=dgcopt.DGC(0.1), first_bucket_mb=0.001)
    with dgcopt.trace(ranks.optimizers[0], folder / "trace-0.json"):
        for step in range(STEPS):
            ranks.step(step)
    ranks.step(STEPS)
    return folder


def test_a_trace_has_every_phase_of_every_collective(traced: Path) -> None:
    events = [event for event in read_trace(traced / "trace-0.json") if event["ph"] == "X"]
    rows = {row: [event for event in events if ROWS[event["tid"]] == row] for row in ROWS}
    votes = [event for event in rows["wire"] if event["name"].endswith(" vote")]
    assert len(votes) == STEPS, "nothing is written after the trace has ended"
    for event in rows["wire"]:
        (wait,) = [one for one in rows["waiting"] if one["name"] == event["name"] and one["ts"] >= event["ts"]][:1]
        assert wait["ts"] + wait["dur"] == pytest.approx(event["ts"] + event["dur"], abs=0.3)
    assert {event["name"] for event in rows["compress"]} == {event["name"] for event in rows["queued"]}
    assert all(event["dur"] >= 0 and event["pid"] == 0 for event in events)
    sent = sum(event["args"]["bytes"] for event in rows["queued"])
    assert sent == sum(event["args"]["bytes"] for event in rows["wire"] if "bucket" in event["name"]) > 0


def test_a_trace_can_be_read_after_a_crash(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "trace.json", 3)
    trace.phase("compress", "bucket 0", 1.0, 2.5)
    trace.flush()
    with (tmp_path / "trace.json").open("a") as file:
        file.write('{"name": "half')
    (event,) = [event for event in read_trace(tmp_path / "trace.json") if event["ph"] == "X"]
    assert (event["pid"], event["name"], event["dur"]) == (3, "bucket 0", 1.5e6)
    assert (tmp_path / "trace.json").read_text().startswith("[\n")


def test_a_run_is_read_up_to_its_last_whole_line(traced: Path) -> None:
    run = read_run(traced)
    assert [entry["loss"] for entry in run.entries] == [2.0, 1.0, 0.5]
    assert run.notes == ["step 12: uses <BF16()>"]
    assert run.steps == STEPS and set(run.phases) == {0}
    assert sum(run.phases[0][row] for row in ("compress", "apply")) > 0
    assert len(run.sent) > 1, "several buckets"


def test_numbers_of_a_whole_run_are_those_of_its_end(tmp_path: Path) -> None:
    """Skipped steps after the last entry count; the result of a run that was resumed, and goes on, does not."""
    folder = history(tmp_path / "run", [3.0, 2.0, 1.0], skipped=1)
    result = {"steps": 30, "accuracy": 0.5, "seconds": 7.0, "skipped": 2}
    (folder / "result.json").write_text(json.dumps(result))
    (row,) = _rows([read_run(folder)])
    assert (row[2], row[3], row[5], row[-1]) == ("30", "0.5", "7", "2")
    (folder / "result.json").write_text(json.dumps(result | {"steps": 20}))
    (row,) = _rows([read_run(folder)])
    assert (row[2], row[3], row[5], row[-1]) == ("30", "", "6", "1")


def test_the_page_holds_all_it_shows(traced: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    other, page = history(tmp_path / "dense", [3.0, 2.0]), tmp_path / "report.html"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["dgcopt", "report", str(traced), str(other), "--output", str(page)])
        assert main() == 0
    assert str(page) in capsys.readouterr().out
    text = page.read_text()
    for word in (
        "Loss",
        "Bytes of messages by bucket",
        "Norm of the residual",
        "Skipped steps",
        "queued",
        "Choices of dgc",
    ):
        assert word in text, word
    assert "uses &lt;BF16()&gt;" in text and "<BF16()>" not in text, "words of a run are no tags"
    assert text.count("<svg") == 5
    linked = re.findall(r'(?:src|href)\s*=\s*"(?!#)([^"]*)"', text)
    assert not linked, f"another file is needed: {linked[:3]}"


def test_pages_of_the_same_runs_are_the_same(traced: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pages = [tmp_path / "one.html", tmp_path / "other.html"]
    for page in pages:
        write_report([traced], page)
    assert pages[0].read_bytes() == pages[1].read_bytes()


def test_names_of_folders_are_text(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    folder = tmp_path / "lr $\\frac$ <b>"
    folder.mkdir()
    (folder / "history.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0}\n')
    write_report([folder], tmp_path / "report.html")
    assert "lr $\\frac$ &lt;b&gt;" in (tmp_path / "report.html").read_text()


LOSS = '{"step": 1, "loss": 2.0}\n'
EVENT = '{"name": "b", "ph": "X", "pid": 0, "tid": 0, "dur": 2.0, "args": {"bytes": 3}},\n'


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("history.jsonl", "not json\n", "history.jsonl, line 1, is damaged: "),
        ("history.jsonl", LOSS + '{"step": 2, "lo{"step": 3, "loss": 1.0}\n' + LOSS, "history.jsonl, line 2, is"),
        ("history.jsonl", LOSS + "\0\0\n" + LOSS, "history.jsonl, line 2, is damaged: "),
        ("history.jsonl", "3\n", "history.jsonl, line 1, is no object of JSON"),
        ("history.jsonl", b"\xff\xfe\n", "history.jsonl is damaged: it is no text"),
        ("history.jsonl", '{"loss": 3.0}\n', "history.jsonl, line 1: 'step' is None, no number"),
        ("history.jsonl", LOSS + '{"step": 2, "loss": "x"}\n', "history.jsonl, line 2: 'loss' is 'x', no number"),
        ("history.jsonl", '{"step": 1' + 400 * "0" + ', "loss": 1}\n', "history.jsonl, line 1: 'step' is 1000"),
        ("result.json", '{"accuracy": 0.', "result.json is damaged: "),
        ("result.json", "", "result.json is damaged: "),
        ("result.json", "[]", "result.json is no object of JSON"),
        ("result.json", '{"accuracy": "high"}', "result.json: 'accuracy' is 'high', no number"),
        ("trace-0.json", "[\n" + EVENT + '{"name": "buck},\n' + EVENT, "trace-0.json, line 3, is damaged: "),
        ("trace-0.json", "[" + EVENT.strip(",\n") + "]", "trace-0.json is no history and no trace of dgcopt.trace"),
        ("trace-0.json", "[" + EVENT.strip(",\n") + "]\n", "trace-0.json, line 1, is no object of JSON"),
        ("trace-0.json", '{"ph": "X"}\n', "trace-0.json is no trace of dgcopt.trace: KeyError('pid')"),
        ("trace-0.json", EVENT.replace('"pid": 0', '"pid": [0]'), "trace-0.json is no trace of"),
        ("trace-0.json", EVENT.replace('"pid": 0', '"pid": "x"'), "trace-0.json is no trace of"),
    ],
)  # fmt: skip
def test_damaged_files_are_named(name: str, content: str | bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "history.jsonl").write_text(LOSS)
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError) as error:
        read_run(tmp_path)
    assert str(error.value).startswith(f"{tmp_path / said}"), error.value


@pytest.mark.parametrize("cut", ['{"name": "bu', '{"name": "b", "args": {}', "", "["])
def test_the_rest_of_a_cut_trace_is_read(cut: str, tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text("[\n" + EVENT + cut)
    assert [event["dur"] for event in read_trace(tmp_path / "trace.json")] == [2.0]


def test_a_name_of_any_bytes(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    folder = history(tmp_path / os.fsdecode(b"run\xff"), [2.0, 1.0])
    write_report([folder], tmp_path / "report.html")
    assert "<title>dgcopt report: run\\xff</title>" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_runs_are_named_in_the_legend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current folder, and one whose name begins with an underscore, which matplotlib leaves out."""
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(history(tmp_path / "_here", [2.0, 1.0]))
    write_report([Path()], tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text().count("<!--  _here -->") == 2  # loss and ratio


def test_bad_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"history\.jsonl: No such file.* Give a folder that train\.py has written"):
        read_run(tmp_path)
    with pytest.raises(ConfigError, match="cannot write the trace"):
        Trace(tmp_path / "none" / "trace.json", 0)
    bare, path = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1), tmp_path / "trace.json"
    with pytest.raises(ConfigError, match=r"that dgcopt\.DistributedOptimizer has wrapped"), dgcopt.trace(bare, path):
        pass


def test_a_browser_shows_the_page(traced: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed")
    page, shot = tmp_path / "report.html", tmp_path / "report.png"
    write_report([traced], page)
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        f"--user-data-dir={tmp_path}/user",
    ]
    told = subprocess.run(
        [browser, *flags, "--window-size=1200,2400", f"--screenshot={shot}", "--dump-dom", page.as_uri()],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert told.returncode == 0, told.stderr[-2000:]
    if "<title>" not in told.stdout:  # some versions do one of the two
        told = subprocess.run(
            [browser, *flags, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=240, check=False
        )
    assert "<title>dgcopt report: dgc</title>" in told.stdout
    assert told.stdout.count("<svg") == 5
    import matplotlib.image

    pixels = matplotlib.image.imread(shot)
    assert pixels.shape[1] == 1200
    colourful = (pixels[..., :3].max(-1) - pixels[..., :3].min(-1) > 0.2).mean()
    assert colourful > 0.001, "curves and bars are drawn"
