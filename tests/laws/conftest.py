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
