"""How often real processes had to be started once more is counted, shown at the end, and bounded."""

import pytest
from launching import SESSION


def pytest_sessionfinish(session: pytest.Session) -> None:
    if SESSION.too_often and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if SESSION.launches:
        terminalreporter.section("launches of real processes")
        terminalreporter.line(str(SESSION))
