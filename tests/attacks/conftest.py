"""What all attacks share: counts of what was tried and found, printed at the end of the tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from attacking import COUNTS, FINDINGS

BY_TEST: dict[str, Counter[str]] = {}


@pytest.fixture(autouse=True)
def _no_colors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every attack as a piped command without colors."""
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.fixture(autouse=True)
def _count(request: pytest.FixtureRequest) -> Iterator[None]:
    """Count what every test tried and found."""
    before = COUNTS.copy()
    yield
    BY_TEST.setdefault(request.node.nodeid.split("[")[0].rpartition("/")[2], Counter()).update(COUNTS - before)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the numbers of `docs/reliability.md`: a line for every test, and one for all."""
    for name, counts in [*BY_TEST.items(), ("all attacks", COUNTS)]:
        found = ", ".join(f"{finding} {counts[finding]:,}" for finding in FINDINGS)
        if counts:
            terminalreporter.write_line(f"{name}: inputs {counts['inputs']:,}, {found}")
