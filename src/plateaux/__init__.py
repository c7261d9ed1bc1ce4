"""Plateaux: deep ensembles whose members are flat and diverse, and that know when they do not know.

recipe = plateaux.Recipe.load("quickstart")
run = plateaux.train(recipe, out="runs/quickstart")
for measurement in plateaux.evaluate("runs/quickstart"):
    print(measurement.measure, measurement.rows)
probabilities = plateaux.load("runs/quickstart").predict(images)
"""

__version__ = "0.1.0"

from plateaux.adopt import adopt
from plateaux.answers import Answers, predict
from plateaux.build import Given
from plateaux.detect import detect
from plateaux.doubt import Calibration, calibrate, judge
from plateaux.ensemble import Ensemble
from plateaux.errors import PlateauxError
from plateaux.evaluate import evaluate, load
from plateaux.exchange import Ask, Measure, Method, Moment, Objective, Rendezvous, View
from plateaux.ground import Ground, Probe
from plateaux.landscape import landscape
from plateaux.measurement import Measurement
from plateaux.mixing import Chosen, choose_members, load_chosen, soup
from plateaux.plan import Job, Meeting, plan
from plateaux.recipe import Recipe
from plateaux.registry import dataset, executor, measure, method, model, probe
from plateaux.robust import robustness
from plateaux.run import Run
from plateaux.samples import Data, from_dataset, from_tensors
from plateaux.train import missing, train
from plateaux.types import Batch, Tree, Value

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
