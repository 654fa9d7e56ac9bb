"""Workers are killed in the middle of a step, or come: training goes on, and the account of every gradient is right.

The scripts of examples/ assert it themselves; here they are launched, and what they met on the way is checked.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.support.launching import PROGRAMS, ROOT, Outcome, free_port, launch, missing

pytestmark = [pytest.mark.processes, pytest.mark.timeout(500)]

EXAMPLES = ROOT / "examples"
LIMIT = 150.0
STEPS, KILL_AT, LAST_COMMIT = 12, 7, 6
TRAIN = str(ROOT / "train.py")
GROWS = "ls | grep -q 'step-0*[1-9]' && touch grown\n"
GROWS += "echo localhost:2; [ -e grown ] && echo 127.0.0.1:2 || echo 127.0.0.1:1"
"""Two hosts of 3 slots, and of 4 once something but the start is committed."""


def torchrun(size: int, directory: Path, *options: str) -> Outcome:
    if missing("torch"):
        pytest.skip(missing("torch"))
    program = ["-m", "torch.distributed.run", "--nproc-per-node", str(size), "--max-restarts", "1"]
    program += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", str(EXAMPLES / "elastic_torchrun.py")]
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return done(launch("torch", size, [*program, str(directory), *options], limit=LIMIT, env=env, bare=True))


def horovodrun(
    size: int,
    hosts: str,
    directory: Path,
    *options: str,
    script: str = "elastic_horovod.py",
    env: dict[str, str] | None = None,
) -> Outcome:
    """`hosts` are shell commands that print a host and its slots per line; Horovod runs them again every second."""
    if missing("horovod-gloo"):
        pytest.skip(missing("horovod-gloo"))
    discover = directory / "discover.sh"
    discover.write_text(f"#!/bin/sh\ncd {directory}\n{hosts}")
    discover.chmod(0o755)
    program = ["-m", "horovod.runner.launch", "-np", str(size), "--min-np", "2", "--elastic-timeout", "60"]
    program += ["--host-discovery-script", str(discover), sys.executable, str(EXAMPLES / script)]
    options = options if script == TRAIN else (str(directory), *options)
    outcome = done(launch("horovod-gloo", size, [*program, *options], limit=LIMIT, env=env, bare=True))
    # Horovod is patched for that: who had given up kept his connections, and others waited for him
    assert "Timed out waiting" not in outcome.output, outcome.tail
    return outcome


def done(outcome: Outcome) -> Outcome:
    assert outcome.code == 0, f"ended with {outcome.code} after {outcome.seconds:.0f} s:\n{outcome.tail}"
    assert not outcome.orphans, f"left {len(outcome.orphans)} process(es) behind:\n{outcome.tail}"
    return outcome


def starts(outcome: Outcome) -> list[tuple[int, int, int]]:
    """Rank, size of the world and first step, whenever a rank began to train."""
    found = re.findall(r"rank (\d+) of (\d+) goes on from step (\d+)", outcome.output)
    return [(int(rank), int(size), int(step)) for rank, size, step in found]


def everyone(size: int, step: int) -> set[tuple[int, int, int]]:
    return {(rank, size, step) for rank in range(size)}


def assert_right(outcome: Outcome, size: int) -> None:
    account = re.search(rf"account on {size} ranks: .*off by at most ([\d.e+-]+)", outcome.output)
    assert account is not None and float(account[1]) < 1e-11, outcome.tail


def test_torchrun_starts_all_workers_anew(tmp_path: Path) -> None:
    options = ["--steps", str(STEPS), "--kill-at", str(KILL_AT), "--reduce", "owner"]
    outcome = torchrun(3, tmp_path, *options)
    assert "exitcode: -9" in outcome.output, outcome.tail
    assert len(starts(outcome)) == 6
    assert set(starts(outcome)) == everyone(3, 0) | everyone(3, LAST_COMMIT)
    assert_right(outcome, 3)

    fewer = torchrun(2, tmp_path, "--steps", str(STEPS + 6), "--reduce", "owner")
    assert set(starts(fewer)) == everyone(2, STEPS)
    assert_right(fewer, 2)


def test_torchrun_takes_in_agents_and_goes_on_without(tmp_path: Path) -> None:
    """The script of the test above, but for how long it trains: 1 rank, then 2, then 1 again."""
    if missing("torch"):
        pytest.skip(missing("torch"))
    code = (EXAMPLES / "elastic_torchrun.py").read_text()
    for old, new in (
        ("while step < args.steps:", "while not dgcopt.broadcast_object((args.directory / 'enough').exists()):"),
        ('parser.add_argument("--steps", type=int, required=True)', ""),
        ('default="gather"', 'default="owner"'),
        ("applied}, step)", "applied}, step)\n        print('committed', step, flush=True)\n        time.sleep(0.2)"),
        ("import argparse", f"import argparse, sys, time\nsys.path.append({str(EXAMPLES)!r})"),
    ):
        assert code.count(old) == 1
        code = code.replace(old, new)
    (tmp_path / "train.py").write_text(code)
    program = [str(PROGRAMS / "resize_torchrun.py"), str(tmp_path / "train.py"), str(tmp_path), str(free_port())]
    outcome = done(launch("torch", 1, program, limit=LIMIT, bare=True))
    first = outcome.output.partition("== second")[0]
    sizes = [int(size) for size in re.findall(r"rank \d of (\d) goes on from step", first)]
    assert sizes == [1, 2, 1], outcome.tail
    steps = [int(step) for step in re.findall(r"goes on from step (\d+)", first)]
    assert 0 == steps[0] < steps[1] < steps[2], "each went on from a commit of the one before"
    assert_right(outcome, 1)


def test_horovod_goes_on_with_those_that_are_left(tmp_path: Path) -> None:
    options = ["--steps", str(STEPS), "--kill-at", str(KILL_AT), "--kill-host", "127.0.0.1", "--reduce", "owner"]
    outcome = horovodrun(3, "echo localhost:2; echo 127.0.0.1:1", tmp_path, *options)
    assert "exit with status code 137" in outcome.output, outcome.tail
    assert set(starts(outcome)) == everyone(3, 0) | everyone(2, LAST_COMMIT)
    assert outcome.output.count("has seen worlds of [3, 2]") == 2, outcome.tail
    assert_right(outcome, 2)


def test_horovods_own_state_goes_on_with_those_that_are_left(tmp_path: Path) -> None:
    """One line changed: the optimizer rejoins by itself, and each of those that are left keeps what it held back."""
    options = ["--steps", str(STEPS), "--kill-at", str(KILL_AT), "--kill-host", "127.0.0.1"]
    hosts = "echo localhost:2; echo 127.0.0.1:1"
    outcome = horovodrun(3, hosts, tmp_path, *options, script="elastic_torch_state.py")
    assert "exit with status code 137" in outcome.output, outcome.tail
    assert set(starts(outcome)) == everyone(3, 0) | everyone(2, LAST_COMMIT)
    assert outcome.output.count("has seen worlds of [3, 2]") == 2, outcome.tail
    words = r"rejoined: it was rank \d of 3, and is rank (\d) of 2. It keeps .* \(norm (\S+)\)"
    rejoined = re.findall(words, outcome.output)
    assert sorted(rank for rank, _ in rejoined) == ["0", "1"] and all(float(norm) > 0 for _, norm in rejoined)
    assert_right(outcome, 2)


def test_averaging_goes_on_from_the_mean_of_all_ranks_that_there_were(tmp_path: Path) -> None:
    options = ["--steps", "13", "--kill-at", str(KILL_AT), "--kill-host", "127.0.0.1"]
    outcome = horovodrun(3, "echo localhost:2; echo 127.0.0.1:1", tmp_path, *options, script="elastic_averaging.py")
    assert "exit with status code 137" in outcome.output, outcome.tail
    assert set(starts(outcome)) == everyone(3, 0) | everyone(2, LAST_COMMIT)
    assert len(re.findall("weights on 2 ranks: .* off by at most", outcome.output)) == 2, outcome.tail


def test_horovod_takes_in_workers_that_come(tmp_path: Path) -> None:
    """Nothing is lost, as what was done is committed first."""
    outcome = horovodrun(3, GROWS, tmp_path, "--steps", "60", "--seconds", "0.2", "--reduce", "auto")
    assert [size for _, size, _ in starts(outcome)] == [3] * 3 + [4] * 4, outcome.tail
    assert outcome.output.count("has seen worlds of [3, 4]") == 4, outcome.tail
    assert_right(outcome, 4)


def test_averaging_takes_in_workers_that_come(tmp_path: Path) -> None:
    """They join the wire in the order in which others rejoin it: the algorithm, its warm-up, its outer optimizers."""
    options = ["--steps", "61", "--seconds", "0.2", "--diloco"]
    outcome = horovodrun(3, GROWS, tmp_path, *options, script="elastic_averaging.py")
    assert [size for _, size, _ in starts(outcome)] == [3] * 3 + [4] * 4, outcome.tail
    assert len(re.findall("weights on 4 ranks: .* off by at most", outcome.output)) == 4, outcome.tail


# Says which samples were drawn: a line per sample, in a file per worker. A step takes 0.1 s, so that hosts can change
# meanwhile; and one of three workers kills itself in its tenth step with them.
DRAWN = """
import os, signal, time
from pathlib import Path
import horovod.torch as hvd
from dgcopt.tasks.digits import Digits


class DrawnDigits(Digits):
    among_three = 0

    def __getitem__(self, index):
        with open(Path(__file__).with_name(f"drawn-{os.getpid()}"), "a") as file:
            file.write(f"{index}\\n")
        time.sleep(0.003)
        self.among_three += hvd.size() == 3
        if os.environ["HOROVOD_HOSTNAME"] == "127.0.0.1" and self.among_three == 300:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)
"""


def test_train_py_takes_in_a_worker_and_goes_on_when_one_is_lost(tmp_path: Path) -> None:
    """One run of 2 workers, then 3, then 2 again: each step is by those there are, and no sample is left out."""
    pytest.importorskip("jsonargparse")
    pytest.importorskip("sklearn")
    (tmp_path / "drawn.py").write_text(DRAWN)
    hosts = "ls run/checkpoints 2>&1 | grep -q 'step-00000*[1-9][0-9]' && touch grown\n"
    hosts += "echo 127.0.0.1:1; [ -e grown ] && echo localhost:2 || echo localhost:1"
    options = [f"--config={ROOT}/configs/{name}.yaml" for name in ("tasks/digits", "compressors/dgc")]
    options += ["--train_data", "drawn.DrawnDigits", "--train_data.split", "train", "--compressor.reduce", "owner"]
    options += ["--epochs", "4", "--log_steps", "1", "--checkpoint_steps", "5"]
    options += ["--scheduler", "torch.optim.lr_scheduler.StepLR", "--scheduler.step_size", "100"]
    options += ["--optimizer.lr", "0.03", "--warmup_epochs", "0", "--compressor.ratio", "0.1", "--deadline", "60"]
    options += ["--output", f"{tmp_path}/run"]
    env = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)]), "HOROVOD_GLOO_TIMEOUT_SECONDS": "60"}
    outcome = horovodrun(2, hosts, tmp_path, *options, "--resume", script=TRAIN, env=env)
    resized = re.findall(r"step (\d+) was saved by (\d) worker\(s\), and now there are (\d)", outcome.output)
    assert [(before, now) for _, before, now in resized] == [("2", "3"), ("3", "2")], outcome.tail
    grown, shrunk = (int(step) for step, _, _ in resized)
    assert 10 <= grown < shrunk

    history = [json.loads(line) for line in (tmp_path / "run/history.jsonl").read_text().splitlines()]
    steps = [entry for entry in history if "loss" in entry]
    workers = [3 if grown < step <= shrunk else 2 for step in range(1, len(steps) + 1)]
    assert [entry["step"] for entry in steps] == list(range(1, len(steps) + 1)), "each once"
    assert [entry["lr"] for entry in steps] == pytest.approx([0.03 * size for size in workers])

    taken, at, seen = Counter(), 0, 0
    for epoch in range(4):
        order = torch.randperm(1438, generator=torch.Generator().manual_seed(epoch)).tolist()
        while at < len(workers) and 1438 - seen >= 32 * workers[at]:
            taken.update(order[seen : seen + 32 * workers[at]])
            at, seen = at + 1, seen + 32 * workers[at]
        assert [entry["step"] for entry in history if "accuracy" in entry][epoch] == at
        seen = 0
    assert at == len(steps)
    drawn = Counter(int(line) for path in tmp_path.glob("drawn-*") for line in path.read_text().split())
    assert not taken - drawn, "samples were left out"
    assert 0 < (drawn - taken).total() <= 5 * 3 * 32, "more was taken again than what was done since the last commit"

    result = json.loads((tmp_path / "run/result.json").read_text())
    assert result["workers"] == 2 and result["wire"] == "horovod" and result["steps"] == len(steps)
    assert result["accuracy"] > 0.5
