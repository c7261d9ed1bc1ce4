"""Inputs to compare graphs on: samples of the run's test split, or random ones if the data are not available."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from plateaux.core.errors import PlateauxError, first_line
from plateaux.data.data_summary import TensorSummary
from plateaux.prediction.contract import InputContract
from plateaux.prediction.inputs import prepare
from plateaux.storage.run import Run
from plateaux.storage.stored_data import build_run_data

SEED = 0
logger = logging.getLogger(__name__)


def sample_inputs(run: Run, contract: InputContract, count: int) -> tuple[str, Mapping[str, NDArray[Any]]]:
    """Return a description and `count` prepared inputs; samples repeat if there are fewer."""
    try:
        test = build_run_data(run).test
        if test.fingerprint() != run.info.data.test.fingerprint and run.components.data is None:
            raise PlateauxError("the test samples have changed since training")
        if not len(test):
            raise PlateauxError("the run has none")
        x, _ = test.fetch(torch.arange(count) % len(test))
        return f"samples of the test split of {run.info.data.name}", prepare(x, contract).arrays
    except (PlateauxError, OSError) as problem:
        logger.warning(
            "The test samples of the run are not available (%s): graphs are compared on random inputs",
            first_line(problem),
        )
    return random_inputs(contract, count)


def random_inputs(contract: InputContract, count: int) -> tuple[str, Mapping[str, NDArray[Any]]]:
    """Return a description and `count` random inputs inside of the range of training."""
    generator = np.random.default_rng(SEED)
    arrays = {name: _random(summary, count, generator) for name, summary in contract.inputs.items()}
    return f"random inputs of seed {SEED}", prepare(arrays if set(arrays) != {"x"} else arrays["x"], contract).arrays


def _random(summary: TensorSummary, count: int, generator: np.random.Generator) -> NDArray[Any]:
    shape = (count, *summary.shape)
    if summary.dtype == "uint8":
        return generator.integers(0, 256, shape, dtype=np.uint8)
    low, high = (0.0 if bound is None else bound for bound in (summary.low, summary.high))
    if summary.dtype.startswith(("float", "bfloat")):
        return generator.uniform(low, max(low, high), shape).astype(np.float32)
    return generator.integers(int(low), max(int(low), int(high)) + 1, shape, dtype=np.int64)
