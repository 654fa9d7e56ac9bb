"""Writes docs/compatibility.md from what came of the trials on two versions of torch.

DGCOPT_COMPATIBILITY=old.jsonl python -m pytest tests/compatibility     # once with each version of torch
python tests/compatibility/page.py old.jsonl new.jsonl > docs/compatibility.md
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.compatibility import trials  # noqa: F401
from tests.compatibility.table import GROUPS, TRIALS, Trial

HEAD = """# Compatibility

Tests on two ranks, on a CPU, with torch {old} and {new}. `tests/compatibility`, a part of the test suite, wrote
this page.

- *works*: for an optimizer or a model, two ranks on half batches train as one process on whole batches, without
  compression and with DGC at ratio 1; with TopK and DGC at 10% all ranks keep the same bits; NaN on one rank skips the
  step on both; a restored checkpoint continues with the same bits.
- *refused*: an error at wrapping; the last column quotes it.
- *not yet*: does not work yet, for the reason in the last column.
- —: does not exist in this version of torch, or could not be tested.
"""


def short(said: str) -> str:
    """What a cell of the table says."""
    return {"works": "works", "refused": "refused", "absent": "—", "not tried": "not tried"}.get(
        said.partition(":")[0], "not yet"
    )


def remark(trial: Trial, said: list[str]) -> str:
    """What stands behind the verdicts: the message, what is missing, or the trial's own note."""
    for line in reversed(said):
        if line.startswith("refused: "):
            message = line.removeprefix("refused: ")
            return "“" + (message if len(message) <= 240 else message[:240].rsplit(" ", 1)[0] + " …") + "”"
    notes = [trial.note] if trial.note else []
    notes += [trial.not_yet] if trial.not_yet and any(line.startswith("not yet") for line in said) else []
    notes += sorted({line.removeprefix("absent: ") for line in said if line.startswith("absent: ")})
    return "; ".join(notes)


def page(results: dict[str, dict[str, str]]) -> str:
    old, new = sorted(results, key=lambda version: [int(part) for part in version.split(".")])
    lines = [HEAD.format(old=old, new=new)]
    for group in GROUPS:
        lines += [f"## {group}\n", f"| feature | torch {old} | torch {new} | |", "|---|---|---|---|"]
        for what, trial in TRIALS.items():
            if trial.group == group:
                said = [results[version].get(what, "not tried") for version in (old, new)]
                cells = [what, *map(short, said), remark(trial, said).replace("|", "\\|")]
                lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    results: dict[str, dict[str, str]] = {}
    for path in sys.argv[1:]:
        for line in Path(path).read_text().splitlines():
            record = json.loads(line)
            results.setdefault(record["torch"], {})[record["what"]] = record["said"]
    print(page(results).rstrip())


if __name__ == "__main__":
    main()
