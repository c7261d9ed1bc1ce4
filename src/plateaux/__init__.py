"""Plateaux: deep ensembles whose members are flat and diverse, and that know when they do not know.

recipe = plateaux.Recipe.load("quickstart")
run = plateaux.train(recipe, out="runs/quickstart")
for measurement in plateaux.evaluate("runs/quickstart"):
    print(measurement.measure, measurement.rows)
probabilities = plateaux.load("runs/quickstart").predict(images)
"""

__version__ = "0.1.0"

from plateaux.adopt import adopt
from plateaux.build import Given
from plateaux.ensemble import Ensemble
from plateaux.errors import PlateauxError
from plateaux.evaluate import Measurement, evaluate, load
from plateaux.exchange import Ask, Measure, Method, Moment, Objective, Rendezvous, View
from plateaux.plan import Job, Meeting, plan
from plateaux.recipe import Recipe
from plateaux.registry import dataset, executor, measure, method, model
from plateaux.run import Run
from plateaux.samples import Data, from_dataset, from_tensors
from plateaux.train import missing, train
from plateaux.types import Batch, Tree, Value

__all__ = [
    "Ask",
    "Batch",
    "Data",
    "Ensemble",
    "Given",
    "Job",
    "Measure",
    "Measurement",
    "Meeting",
    "Method",
    "Moment",
    "Objective",
    "PlateauxError",
    "Recipe",
    "Rendezvous",
    "Run",
    "Tree",
    "Value",
    "View",
    "adopt",
    "dataset",
    "evaluate",
    "executor",
    "from_dataset",
    "from_tensors",
    "load",
    "measure",
    "method",
    "missing",
    "model",
    "plan",
    "train",
]
