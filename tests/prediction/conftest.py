"""The test images of scikit-learn's digits."""

from __future__ import annotations

import pytest
import torch

from plateaux.core.registry import dataset


@pytest.fixture(scope="session")
def images() -> torch.Tensor:
    x, _ = dataset.get("digits")().test.fetch(torch.arange(599))
    assert isinstance(x, torch.Tensor)
    return x
