"""Plateaux: deep ensembles whose members are flat and diverse, and that know when they do not know.

recipe = plateaux.Recipe.load("quickstart")
run = plateaux.train(recipe, out="runs/quickstart")
for measurement in plateaux.evaluate("runs/quickstart"):
    print(measurement.measure, measurement.rows)
probabilities = plateaux.load("runs/quickstart").predict(images)
"""

__version__ = "0.1.0"

from plateaux.config.builders.model import Given
from plateaux.config.recipe import Recipe
from plateaux.core.errors import PlateauxError
from plateaux.core.method import Ask, Measure, Method, Moment, Objective, Rendezvous, View
from plateaux.core.registry import dataset, executor, measure, method, model, probe
from plateaux.core.types import Batch, Tree, Value
from plateaux.data.sources import Data, from_dataset, from_tensors
from plateaux.ensembles.ensemble import Ensemble
from plateaux.evaluation.calibration import Calibration, calibrate, judge
from plateaux.evaluation.evaluate import evaluate, load
from plateaux.evaluation.ood import detect
from plateaux.evaluation.predict import Answers, predict
from plateaux.evaluation.results import Measurement
from plateaux.evaluation.robustness import robustness
from plateaux.evaluation.soup import Chosen, choose_members, load_chosen, soup
from plateaux.loss_landscape.loss_surface import Ground, Probe
from plateaux.loss_landscape.run_probes import landscape
from plateaux.storage.import_weights import adopt
from plateaux.storage.run import Run
from plateaux.training.planning import Job, Meeting, plan
from plateaux.training.train import missing, train

__all__ = [
    "Answers",
    "Ask",
    "Batch",
    "Calibration",
    "Chosen",
    "Data",
    "Ensemble",
    "Given",
    "Ground",
    "Job",
    "Measure",
    "Measurement",
    "Meeting",
    "Method",
    "Moment",
    "Objective",
    "PlateauxError",
    "Probe",
    "Recipe",
    "Rendezvous",
    "Run",
    "Tree",
    "Value",
    "View",
    "adopt",
    "calibrate",
    "choose_members",
    "dataset",
    "detect",
    "evaluate",
    "executor",
    "from_dataset",
    "from_tensors",
    "judge",
    "landscape",
    "load",
    "load_chosen",
    "measure",
    "method",
    "missing",
    "model",
    "plan",
    "predict",
    "probe",
    "robustness",
    "soup",
    "train",
]
