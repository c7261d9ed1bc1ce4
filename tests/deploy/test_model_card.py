"""The model card of a bundle: tables, and limits that are stated once and in sentences."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from plateaux.deploy.bundle import Bundle
from plateaux.deploy.manifest import Manifest, MeasuredNumber
from plateaux.deploy.model_card import model_card
from plateaux.prediction.predictions import NOT_CALIBRATED

pytestmark = pytest.mark.xdist_group("bundle")  # one worker makes the bundle once


@pytest.fixture(scope="module")
def manifest(exported: Path) -> Manifest:
    return Bundle.open(exported).manifest


def limits(manifest: Manifest) -> list[str]:
    text = model_card(manifest).partition("## Limits\n")[2].partition("\n## ")[0]
    return [line.removeprefix("- ") for line in text.splitlines() if line]


def test_text_columns_are_aligned_to_the_left_and_numbers_to_the_right(manifest: Manifest) -> None:
    number = MeasuredNumber("accuracy", "mean probability", 0.9, 0.01, "test", "digits", 360, "0" * 32)
    lines = model_card(replace(manifest, measured=(number,))).splitlines()
    assert lines[lines.index("| answer | meaning |") + 1] == "|---|---|"
    at = lines.index("| metric | value ± standard error | data |")
    assert lines[at + 1] == "|---|---:|---|"
    assert lines[at + 2] == "| accuracy, mean probability | 0.9 ± 0.01 | digits (test, 360 samples) |"


def test_the_limits_of_an_uncalibrated_bundle_state_the_missing_calibration_once(manifest: Manifest) -> None:
    found = limits(replace(manifest, calibration=None, remark=NOT_CALIBRATED))
    assert sum("not calibrated" in line for line in found) == 1
    assert not any("plateaux calibrate" in line for line in found)  # whoever reads the card does not have the run


def test_a_remark_of_a_calibrated_bundle_is_a_sentence(manifest: Manifest) -> None:
    assert "No prediction sets: the sets are <b>randomized." not in limits(manifest)
    found = limits(replace(manifest, remark="no prediction sets: the sets are <b>randomized"))
    assert found[-1] == "No prediction sets: the sets are &lt;b>randomized."


def test_limits_state_the_consequences_if_no_threshold_was_found(manifest: Manifest) -> None:
    assert manifest.calibration is not None
    assert manifest.calibration.sets is not None
    assert any(
        line.startswith("The model abstains where its error probability is above 0.") for line in limits(manifest)
    )
    assert any(line.startswith("Prediction sets contain the label of 90 % of new samples") for line in limits(manifest))
    sets = replace(manifest.calibration.sets, threshold=None)
    unfitted = replace(manifest.calibration, sets=sets, max_error_probability=-1.0)
    found = limits(replace(manifest, calibration=unfitted))
    assert any(line.startswith("The model abstains from every answer: ") for line in found)
    assert any(line.startswith("Every prediction set contains all classes: ") for line in found)
    assert not any("-1" in line for line in found)
