"""Plateaux: deep ensembles whose members are flat and diverse, and that know when they do not know.

recipe = plateaux.Recipe.load("quickstart")
run = plateaux.train(recipe, out="runs/quickstart")
result = plateaux.evaluate(run)
print(result["accuracy"].ensemble.value)
predictions = plateaux.load_predictor(run)(images)
"""

__version__ = "0.1.0"

import typing as _typing

# Type checkers see the imports. At run time, a name is imported at its first use: all of them together import torch,
# which takes seconds, and `plateaux --help` needs none. A test compares the imports with the table below.
if _typing.TYPE_CHECKING:
    from plateaux.config.recipe import Recipe
    from plateaux.core.errors import PlateauxError
    from plateaux.core.member import MemberModule
    from plateaux.core.method import DataPartition, GradRequest, Method, Objective, StepContext
    from plateaux.core.metric import Metric
    from plateaux.core.registry import dataset, executor, method, metric, model, probe
    from plateaux.core.types import Batch, Estimate, TensorTree
    from plateaux.data.sources import DataSplits, from_dataset, from_tensors
    from plateaux.deploy.batch import BatchOptions, BatchResult
    from plateaux.deploy.export import export
    from plateaux.deploy.hub import pull, push
    from plateaux.deploy.load_predictor import load_predictor
    from plateaux.deploy.predict import predict
    from plateaux.ensembles.cascade import CascadeOptions
    from plateaux.ensembles.ensemble import Ensemble
    from plateaux.evaluation.evaluate import evaluate
    from plateaux.evaluation.evaluation import Evaluation
    from plateaux.evaluation.ood import detect_ood
    from plateaux.evaluation.options import EvalOptions
    from plateaux.evaluation.results import MetricResult
    from plateaux.evaluation.robustness import robustness
    from plateaux.loss_landscape.loss_surface import LossSurface
    from plateaux.loss_landscape.probe import Probe
    from plateaux.loss_landscape.run_probes import probe_landscape
    from plateaux.loss_landscape.session import ProbeOptions
    from plateaux.optim.sample_sharpness import SampleSharpness
    from plateaux.optim.sharpness_aware import SharpnessAware
    from plateaux.prediction.calibration import Calibration, CalibrationOptions, calibrate, evaluate_calibration
    from plateaux.prediction.cascade import evaluate_cascade
    from plateaux.prediction.predictions import Predictions
    from plateaux.prediction.predictor import Predictor
    from plateaux.prediction.selection import EnsembleSelection, load_selection, select_members
    from plateaux.prediction.soup import soup
    from plateaux.storage.import_weights import import_weights
    from plateaux.storage.open_run import open_run
    from plateaux.storage.run import Run
    from plateaux.training.callbacks import Callback
    from plateaux.training.fit_arrays import fit
    from plateaux.training.from_arrays import from_arrays
    from plateaux.training.jobs import Job, PartitionStatus
    from plateaux.training.planning import pending_jobs, plan
    from plateaux.training.sharpbalance_partition import SharpBalancePartition
    from plateaux.training.trackers import log_results
    from plateaux.training.train import train

__all__ = [
    "Batch",
    "BatchOptions",
    "BatchResult",
    "Calibration",
    "CalibrationOptions",
    "Callback",
    "CascadeOptions",
    "DataPartition",
    "DataSplits",
    "Ensemble",
    "EnsembleSelection",
    "Estimate",
    "EvalOptions",
    "Evaluation",
    "GradRequest",
    "Job",
    "LossSurface",
    "MemberModule",
    "Method",
    "Metric",
    "MetricResult",
    "Objective",
    "PartitionStatus",
    "PlateauxError",
    "Predictions",
    "Predictor",
    "Probe",
    "ProbeOptions",
    "Recipe",
    "Run",
    "SampleSharpness",
    "SharpBalancePartition",
    "SharpnessAware",
    "StepContext",
    "TensorTree",
    "calibrate",
    "dataset",
    "detect_ood",
    "evaluate",
    "evaluate_calibration",
    "evaluate_cascade",
    "executor",
    "export",
    "fit",
    "from_arrays",
    "from_dataset",
    "from_tensors",
    "import_weights",
    "load_predictor",
    "load_selection",
    "log_results",
    "method",
    "metric",
    "model",
    "open_run",
    "pending_jobs",
    "plan",
    "predict",
    "probe",
    "probe_landscape",
    "pull",
    "push",
    "robustness",
    "select_members",
    "soup",
    "train",
]

_MODULES = {
    "config.recipe": ("Recipe",),
    "core.errors": ("PlateauxError",),
    "core.member": ("MemberModule",),
    "core.method": ("DataPartition", "GradRequest", "Method", "Objective", "StepContext"),
    "core.metric": ("Metric",),
    "core.registry": ("dataset", "executor", "method", "metric", "model", "probe"),
    "core.types": ("Batch", "Estimate", "TensorTree"),
    "data.sources": ("DataSplits", "from_dataset", "from_tensors"),
    "deploy.batch": ("BatchOptions", "BatchResult"),
    "deploy.export": ("export",),
    "deploy.hub": ("pull", "push"),
    "deploy.load_predictor": ("load_predictor",),
    "deploy.predict": ("predict",),
    "ensembles.cascade": ("CascadeOptions",),
    "ensembles.ensemble": ("Ensemble",),
    "evaluation.evaluate": ("evaluate",),
    "evaluation.evaluation": ("Evaluation",),
    "evaluation.ood": ("detect_ood",),
    "evaluation.options": ("EvalOptions",),
    "evaluation.results": ("MetricResult",),
    "evaluation.robustness": ("robustness",),
    "loss_landscape.loss_surface": ("LossSurface",),
    "loss_landscape.probe": ("Probe",),
    "loss_landscape.run_probes": ("probe_landscape",),
    "loss_landscape.session": ("ProbeOptions",),
    "optim.sample_sharpness": ("SampleSharpness",),
    "optim.sharpness_aware": ("SharpnessAware",),
    "prediction.calibration": ("Calibration", "CalibrationOptions", "calibrate", "evaluate_calibration"),
    "prediction.cascade": ("evaluate_cascade",),
    "prediction.predictions": ("Predictions",),
    "prediction.predictor": ("Predictor",),
    "prediction.selection": ("EnsembleSelection", "load_selection", "select_members"),
    "prediction.soup": ("soup",),
    "storage.import_weights": ("import_weights",),
    "storage.open_run": ("open_run",),
    "storage.run": ("Run",),
    "training.callbacks": ("Callback",),
    "training.fit_arrays": ("fit",),
    "training.from_arrays": ("from_arrays",),
    "training.jobs": ("Job", "PartitionStatus"),
    "training.planning": ("pending_jobs", "plan"),
    "training.sharpbalance_partition": ("SharpBalancePartition",),
    "training.trackers": ("log_results",),
    "training.train": ("train",),
}
_MODULE_BY_NAME = {name: module for module, names in _MODULES.items() for name in names}

if not _typing.TYPE_CHECKING:

    def __getattr__(name):
        """Return a public name or a sub-package, which is imported now."""
        from importlib import import_module

        if name in _MODULE_BY_NAME:
            globals()[name] = value = getattr(import_module(f"plateaux.{_MODULE_BY_NAME[name]}"), name)
            return value
        if not name.startswith("_"):
            try:
                return import_module(f"plateaux.{name}")
            except ModuleNotFoundError as error:
                if error.name != f"plateaux.{name}":
                    raise
        raise AttributeError(f"module 'plateaux' has no attribute {name!r}")

    def __dir__():
        return sorted({*globals(), *__all__})
