"""A calibrated run of two small networks, and its bundle, shared by the tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from digit_runs import train_digits

import plateaux


@pytest.fixture(scope="session")
def calibrated_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exported") / "run"
    train_digits(out)
    plateaux.calibrate(out, target_risk=0.1)
    plateaux.evaluate(out, metrics=["accuracy", "nll"])
    plateaux.evaluate_calibration(out)
    return out


@pytest.fixture(scope="session")
def exported(calibrated_run: Path) -> Path:
    pytest.importorskip("onnxruntime")
    out = calibrated_run.parent / "bundle"
    plateaux.export(calibrated_run, out, license="CC0-1.0")
    return out
