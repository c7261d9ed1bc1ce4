"""What all attacks share: counts of what was tried and found, printed at the end of the tests."""

from __future__ import annotations

import pytest
from attacking import COUNTS, FINDINGS


@pytest.fixture(autouse=True)
def _no_colors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every attack as a piped command without colors."""
    monkeypatch.setenv("NO_COLOR", "1")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print one line with the numbers of `docs/reliability.md`."""
    if COUNTS:
        found = ", ".join(f"{name} {COUNTS[name]:,}" for name in FINDINGS)
        terminalreporter.write_line(f"attacks: inputs {COUNTS['inputs']:,}, {found}")
