"""A predictor takes anything a user has and returns `Predictions`. Importing this module does not import torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from plateaux.core.errors import DataError, RecipeError, RunError
from plateaux.data.data_summary import class_names
from plateaux.prediction.contract import InputContract
from plateaux.prediction.inputs import PreparedInputs, prepare
from plateaux.prediction.predictions import BY_CLASS, Predictions, concatenate

if TYPE_CHECKING:
    from plateaux.ensembles.ensemble import Ensemble

MAX_BATCH = 64  # inputs of one forward pass

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """What a caller asks a predictor for. None: what the run is calibrated for, or what the bundle has."""

    ood_score: str | None = None
    alpha: float | None = None
    raw: bool = False  # also the answers without the calibration


class Backend(Protocol):
    """Computes the answers for prepared inputs."""

    def __call__(self, arrays: Arrays) -> Mapping[str, NDArray[Any]]:
        """Return the answers by name, with one row per input."""


class Predictor:
    """An ensemble with its input contract and its calibration. Threads may share it.

    `predictor(x)` takes a NumPy array, a tensor, a Pillow image, the path or the bytes of an image file, a text, or
    named texts or arrays; one of them, a batch, or a list. `predictor.ensemble` is the `nn.Module` of a run.
    """

    def __init__(
        self,
        backend: Backend,
        contract: InputContract,
        *,
        outputs: Sequence[str],
        ood_score: str,
        calibrated: bool,
        remark: str = "",
        max_batch: int = MAX_BATCH,
        ensemble: Ensemble | None = None,
    ) -> None:
        if max_batch < 1:
            raise RecipeError(f"max_batch = {max_batch}: give a number of at least 1")
        self.backend, self.contract, self.max_batch = backend, contract, max_batch
        self.outputs, self.ood_score, self.calibrated, self.remark = tuple(outputs), ood_score, calibrated, remark
        self._ensemble = ensemble
        self.class_names = class_names(contract.labels, contract.classes)

    @property
    def ensemble(self) -> Ensemble:
        """The members as one `nn.Module` in their own precision, without checks of inputs. A bundle has none."""
        if self._ensemble is None:
            raise RunError(
                "The predictor of a bundle has no `ensemble`: a bundle contains the graph of the members, not their "
                "`nn.Module`s. Load the run that was exported: plateaux.load_predictor(RUN).ensemble"
            )
        return self._ensemble

    def __call__(self, x: Any) -> Predictions:
        """Return the predictions for one input, a batch, or a list of inputs; there is always one row per input."""
        return self.predict_prepared(prepare(x, self.contract))

    def predict_prepared(self, inputs: PreparedInputs) -> Predictions:
        """Return the predictions for inputs that `prepare` returned."""
        rows = range(0, len(inputs), self.max_batch)
        parts = [{name: a[row : row + self.max_batch] for name, a in inputs.arrays.items()} for row in rows]
        found = concatenate([self._predict(part) for part in parts])
        return replace(found, names=inputs.names)

    def empty(self) -> Predictions:
        """Return predictions without a row."""
        classes = self.contract.classes
        shapes = {name: (0, classes) if name in BY_CLASS else (0,) for name in self.outputs}
        return self._to_predictions({name: np.zeros(shape) for name, shape in shapes.items()})

    def _predict(self, arrays: Arrays) -> Predictions:
        answers = self.backend(arrays)
        if not np.isfinite(answers["probability"]).all():
            raise DataError(
                "The ensemble returned NaN for an input that satisfies its contract. The usual cause is a member whose "
                "weights are NaN, or values so large that they overflow"
            )
        return self._to_predictions(answers)

    def _to_predictions(self, answers: Arrays) -> Predictions:
        about = self.class_names, self.ood_score, self.calibrated, self.remark
        return Predictions.from_answers(answers, *about)
