"""The script that runs on a machine with a device: its output while it runs, and nothing left behind."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_a_step_is_shown_while_it_runs_and_leaves_nothing_behind(tmp_path):
    """Also where what it has started is in a session of its own, holds the output open, and the time is up."""
    script = (ROOT / "scripts" / "gpu.sh").read_text()
    functions = script[script.index("# end TOKEN") : script.index("# step NAME")]
    child = f"import os, time; open({str(tmp_path / 'child')!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    program = (
        "import subprocess, sys, time; print('begun', flush=True); "
        f"subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True); time.sleep(60)"
    )
    lines = [
        "set -uo pipefail",
        f"folder={tmp_path} python=python3 failed=0",
        functions,
        'run short 20 cat <<<"what it reads"',
        'run long 4 "$1" -c "$2"',
        "exit $failed",
    ]
    start = time.monotonic()
    with subprocess.Popen(["bash", "-c", "\n".join(lines), "gpu", sys.executable, program]) as process:
        log = tmp_path / "log.txt"
        while "begun" not in (log.read_text() if log.exists() else "") and time.monotonic() < start + 20:
            time.sleep(0.05)
        assert process.poll() is None, "its output came when it was over"
    assert process.returncode == 1 and time.monotonic() < start + 30
    told = (tmp_path / "gpu.md").read_text()
    assert "### short: exit 0" in told and "what it reads" in told and "### long: exit 124" in told
    environment = b""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # which have ended
        environment = Path("/proc", (tmp_path / "child").read_text(), "environ").read_bytes()
    assert b"DGCOPT_GPU_STEP" not in environment
