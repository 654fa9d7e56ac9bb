"""Ranks of a launch wait for each other where there is no wire, or not any more: by files in the folder of records."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path


def together(word: str, seconds: float = math.inf) -> None:
    """Say a word, and wait until all ranks of the launch have said it, or for no longer than that."""
    folder, end = Path(os.environ["DGCOPT_TEST_RECORDS"]), time.monotonic() + seconds
    (folder / f"{word} {os.getpid()}").touch()
    while len([*folder.glob(f"{word} *")]) < int(os.environ["DGCOPT_TEST_SIZE"]) and time.monotonic() < end:
        time.sleep(0.02)
