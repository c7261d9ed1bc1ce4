"""The digits data set of scikit-learn, which needs no download."""

from __future__ import annotations

import torch

from plateaux.core.errors import DataError
from plateaux.core.ranges import Count, Seed
from plateaux.core.registry import dataset
from plateaux.core.types import derive_seed
from plateaux.data.files import head
from plateaux.data.sources import DataSplits


@dataset
def digits(*, seed: Seed = 0, limit: Count | None = None, test_limit: Count | None = None) -> DataSplits:
    """Digits: 1,198 + 599 handwritten digits of 8 x 8 grayscale pixels, bundled with scikit-learn."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError("The digits need scikit-learn. Install it: pip install 'plateaux[demo]'") from error
    images, labels = load_digits(return_X_y=True)
    x = torch.from_numpy(images * 255 / 16).round().to(torch.uint8).view(-1, 1, 8, 8)
    y = torch.from_numpy(labels).long()
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(derive_seed(seed, "digits")))
    test, train = (part.sort().values for part in (order[: len(y) // 3], order[len(y) // 3 :]))
    return DataSplits(
        "digits",
        train=head(x[train], y[train], limit),
        test=head(x[test], y[test], test_limit),
        classes=10,
        shape=(1, 8, 8),
        mean=(0.3046,),
        std=(0.3751,),
        labels=tuple("0123456789"),
    )
