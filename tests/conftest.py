"""What all tests share: one thread per process, as ranks share few cores; one seed; how often processes were started.

How often they had to be started once more is counted over all processes of pytest, shown at the end, and bounded.
"""

import gc
import logging
import os
import zlib
from collections.abc import Iterator
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # every process would compile all modules of dgcopt and of tests anew

import pytest
import torch

from tests.support.launching import SESSION, launch_of

torch.set_num_threads(1)
if not torch.cuda.is_available():  # read when Triton is imported, which torch does when it likes
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_finish(session: pytest.Session) -> None:
    """Thousands of tests are no garbage, and need not be looked through for any time and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000)  # looking for garbage every 700 objects takes an eighth of the tests' time


def pytest_runtest_setup(item: pytest.Item) -> None:
    """The same numbers and log in every run, whichever tests ran before: what fails once fails again."""
    torch.manual_seed(0)
    logging.getLogger("dgcopt").setLevel(logging.NOTSET)


@pytest.fixture(autouse=True)
def size_of_gradients(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of tests are small, and are copied: in every other test they stay in place, as large ones do."""
    if zlib.crc32(request.node.nodeid.encode()) % 2:
        monkeypatch.setattr("dgcopt.flat.gradient.SMALL", 1)


@pytest.fixture(scope="module")
def standing_workers() -> Iterator[None]:
    """Standing workers of train.py, which end after the last run of a file."""
    from tests.support.train_script import end_standing_workers

    yield
    end_standing_workers()


@pytest.fixture
def parser(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The parser of train.py."""
    from tests.support.train_script import parser_of_train

    return parser_of_train(monkeypatch)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests of one launch, or file, run in one process. Launches are collected before tests of the package, which are
    short: no process waits for another one's launch in the end. The last process takes the tests in reverse, and has
    work for a core while launches of the others wait: three launches at a time would slow each other."""
    from xdist.scheduler import LoadScopeScheduling

    config.option.loadscopereorder = False  # by the number of tests

    class ByLaunch(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return launch_of(nodeid)

        def _assign_work_unit(self, node: Any) -> None:
            if node is self.nodes[-1]:
                self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
            super()._assign_work_unit(node)

    return ByLaunch(config, log)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["launches"] = (SESSION.launches, SESSION.again)
    elif SESSION.too_often and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """What a process of pytest-xdist has counted."""
    launches, again = getattr(node, "workeroutput", {}).get("launches", (0, []))
    SESSION.launches += launches
    SESSION.again += again


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if SESSION.launches:
        terminalreporter.section("launches of real processes")
        terminalreporter.line(str(SESSION))
