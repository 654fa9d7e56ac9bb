"""Every row of docs/compatibility.md is tried: what exists here works, or is refused as the page says.

With DGCOPT_COMPATIBILITY=FILE what came of each is appended to the file, from which `page.py` writes the page.
"""

import functools
import json
import os
from pathlib import Path

import pytest

from tests.compatibility import trials  # noqa: F401
from tests.compatibility.table import TRIALS, verdict, version
from tests.support.launching import Outcome, launch, missing

HERE = Path(__file__).resolve().parent

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]


@functools.cache
def outcomes(*chosen: str) -> dict[str, Outcome]:
    """All that needs real ranks in one launch, and one more behind a trial that has failed on one rank only."""
    found: dict[str, Outcome] = {}
    left = sorted(chosen, key=lambda name: bool(TRIALS[name].not_yet))  # who fails on one rank ends the launch
    while left:
        outcome = launch("torch", 2, [str(HERE / "real_ranks.py"), *left], limit=280, compiler=True)
        tried = [name for name in left if name in outcome.records] or left[:1]
        found |= dict.fromkeys(tried, outcome)
        left = left[left.index(tried[-1]) + 1 :]
    return found


def outcome_of(name: str, chosen: list[str]) -> str:
    trial = TRIALS[name]
    if not trial.real or trial.absent:
        return verdict(trial)
    outcome = outcomes(*chosen)[name]
    records = outcome.records.get(name, {})
    errors = [record["error"] for _, record in sorted(records.items()) if "error" in record]
    assert not errors, errors[0]
    assert set(records) == {0, 1}, f"not both ranks got through it:\n{outcome.tail}"
    assert records[0]["result"].split(":")[0] == records[1]["result"].split(":")[0]
    return records[0]["result"]


@pytest.mark.parametrize("name", TRIALS, ids=[f"{t.group}: {t.what}{', real ranks' * t.real}" for t in TRIALS.values()])
def test_trial(name: str, request: pytest.FixtureRequest) -> None:
    trial = TRIALS[name]
    if missing("torch"):
        pytest.skip(missing("torch"))
    try:
        chosen = [item.callspec.params["name"] for item in request.session.items if item.function is test_trial]
        said = outcome_of(name, [one for one in chosen if TRIALS[one].real and not TRIALS[one].absent])
        failed = None
    except Exception as error:
        said, failed = f"not yet: {error}", error
    if "DGCOPT_COMPATIBILITY" in os.environ:
        with open(os.environ["DGCOPT_COMPATIBILITY"], "a") as file:
            file.write(json.dumps({"torch": version(), "what": name, "said": said}) + "\n")
    if failed is not None and not trial.may_fail(version()):
        raise failed
    if said.startswith("absent"):
        pytest.skip(said)
    if failed is not None:
        pytest.xfail(f"{trial.not_yet}: {failed}")
