"""Workers that are killed at random lines of dgcopt under torchrun's and Horovod's elastic launchers.

Those that are started anew, or left, go on from the last commit, and the account of every gradient is right in the end.
"""

from __future__ import annotations

import os
import random
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.distributed.faults.rules import Seen
from tests.support.launching import ROOT, Outcome, launch, missing

KIND = "elastic"
COUNT, QUICK = 16, 0
LIMIT = 150.0
EXAMPLES = ROOT / "examples"
STEPS, SIZE = 12, 3

STRUCK = """
from tests.distributed.faults.tracing import Lines

def struck(call, step, is_mine):
    if step == {step} - 1 and is_mine:
        with Lines().traced() as lines:
            result = call(step)
        struck.lines = lines.count
        return result
    if step != {step} or not is_mine:
        return call(step)
    with Lines(1 + int({place} * struck.lines), lambda: kill_once(args.directory / "killed")).traced():
        return call(step)

struck.lines = 1000
"""


def plan(seed: int, count: int) -> Iterator[dict[str, Any]]:
    for number in range(count):
        rng = random.Random(f"{seed} {KIND} {number}")
        yield {
            "launcher": "torchrun" if number % 3 < 2 else "horovodrun",
            "reduce": rng.choice(["gather", "owner"]),
            "step": rng.randrange(1, STEPS),
            "rank": rng.randrange(SIZE),
            "place": rng.random(),
        }


def label(fault: dict[str, Any]) -> str:
    return f"a worker killed under {fault['launcher']} elastic"


def describe(fault: dict[str, Any]) -> str:
    return f"{fault['launcher']}: rank {fault['rank']} is killed in step {fault['step']}, reduce={fault['reduce']!r}"


def unavailable(fault: dict[str, Any]) -> str:
    return missing("torch" if fault["launcher"] == "torchrun" else "horovod-gloo")


def inject(fault: dict[str, Any]) -> Seen:
    with tempfile.TemporaryDirectory(prefix="dgcopt-elastic-") as name:
        folder = Path(name)
        script = folder / "script.py"
        is_torch = fault["launcher"] == "torchrun"
        code = (EXAMPLES / ("elastic_torchrun.py" if is_torch else "elastic_horovod.py")).read_text()
        is_mine = f"comm.rank == {fault['rank']}" if is_torch else "os.environ['HOROVOD_HOSTNAME'] == '127.0.0.1'"
        step = "step" if is_torch else "state.step"
        old = f"account.step({step})"
        assert code.count(old) == 1 and code.count("account = Account(") == 1
        code = code.replace(old, f"struck(account.step, {step}, {is_mine})")
        code = code.replace("account = Account(", STRUCK.format(**fault) + "\naccount = Account(")
        script.write_text(code)
        options = [str(folder / "run"), "--steps", str(STEPS), "--reduce", fault["reduce"]]
        (folder / "run").mkdir()
        env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        if is_torch:
            program = ["-m", "torch.distributed.run", "--nproc-per-node", str(SIZE), "--max-restarts", "1"]
            program += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", str(script)]
            outcome = _launch("torch", program + options, env)
            return _judge(outcome, SIZE, (folder / "run/killed").exists())
        discover = folder / "discover.sh"
        discover.write_text("#!/bin/sh\necho localhost:2; echo 127.0.0.1:1")
        discover.chmod(0o755)
        program = ["-m", "horovod.runner.launch", "-np", str(SIZE), "--min-np", "2", "--elastic-timeout", "60"]
        program += ["--host-discovery-script", str(discover), sys.executable, str(script)]
        outcome = _launch("horovod-gloo", program + options, env)
        return _judge(outcome, SIZE - 1, (folder / "run/killed").exists())


def _launch(wire: str, program: list[str], env: dict[str, str]) -> Outcome:
    path = os.pathsep.join([str(ROOT), str(EXAMPLES)])
    return launch(wire, SIZE, program, limit=LIMIT, env={**env, "PYTHONPATH": path}, bare=True)


def _judge(outcome: Outcome, size: int, killed: bool) -> Seen:
    seen = Seen(struck=killed)
    account = re.search(r"account on (\d+) ranks: .*off by at most (\S+)", outcome.output)
    if outcome.code is None:
        seen.late = f"had to be killed after {outcome.seconds:.0f} s: {outcome.tail[-500:]}"
    elif outcome.orphans:
        seen.late = f"left {len(outcome.orphans)} processes behind"
    elif outcome.code != 0:
        seen.unsaid.append(f"ended with {outcome.code}: {outcome.tail[-800:]}")
    elif account is None or float(account[2]) >= 1e-11:
        seen.lost.append(f"the account is wrong: {account and account[0]}")
    elif killed and int(account[1]) != size:
        seen.lost.append(f"{account[1]} ranks ended, not {size}")
    return seen
