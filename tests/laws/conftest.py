"""Shared fixtures of the laws: results of the plain loop, computed once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from cases import recipe, trained

from plateaux.core.types import TensorTree

Loop = Callable[..., list[TensorTree]]


@pytest.fixture(scope="session")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Loop:
    """Return a function from a row of the table to its members' weights, trained by the plain loop."""
    known: dict[str, list[TensorTree]] = {}

    def result(method: str, net: str = "mlp", **options: object) -> list[TensorTree]:
        row = recipe(method, net, **options)  # type: ignore[arg-type]
        name = row.to_toml()
        if name not in known:
            known[name] = trained(row, Path(tmp_path_factory.mktemp("loop")) / "run")
        return known[name]

    return result


# One way to train per pattern of requests. `make check` runs the laws with them, `make nightly` with every method.
PATTERNS = {
    "deep_ensemble": "one request",
    "sam": "two requests",
    "sharpbalance": "some rows, and an average",
    "sam per worker": "the samples of one process",
    "apart, climbing": "outputs of all members",
    "balanced, climbing": "outputs of all members on the whole batch",
    "sed": "some members, and unlabeled samples",
    "a2d, sequential": "members one after the other",
    "snapshot": "members from the weights of the one before",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave methods with the pattern of another one, and most combinations with other networks, to the nightly run."""
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        method = params.get("method", params.get("name"))
        if item.path.parent != Path(__file__).parent or method is None:
            continue
        if method not in PATTERNS or (params.get("net", "mlp") != "mlp" and method != "sam"):
            item.add_marker(pytest.mark.nightly)
