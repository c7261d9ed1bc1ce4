"""A Griffe extension: give functions and data classes of the API reference a table of their parameters.

Names, types and defaults come from the signatures. Meanings are in MEANINGS below, by `owner.parameter` or, if it means
the same everywhere, by `parameter` alone. Texts of an `Args:` section come first; `data, model: ...` describes both.
"""

from __future__ import annotations

from typing import Any

import griffe

MEANINGS = {
    # What entry points share.
    "recipe": "the recipe of the run",
    "out": "the run folder to write: a path, or an address such as `s3://bucket/runs/demo`",
    "root": "a run folder, or the `Run` that `train` returned",
    "run": "a run folder, or the `Run` that `train` returned",
    "components": "Python objects that replace what the recipe names: data, model, loss",
    "data": "the data, instead of what `data.name` of the recipe names",
    "model": "a function that returns an `nn.Module`, instead of what `model.name` names",
    "loss": "a loss function, instead of what `loss.name` names",
    "unlabeled": "a source of unlabeled samples, instead of what `data.unlabeled` names",
    "trust": "modules whose unmarked functions the recipe may call, and Ray clusters that it may connect to",
    "progress": "receives messages, the amount of work done, and updates about members; the default logs messages",
    "branch_from": "a run with the same training before its first data partition: start from its checkpoint",
    "split": "`test`, `validation`, `train`, `corrupted`, `corrupted:fog`, `corrupted:fog:3`; `@N` takes the first N",
    "metrics": "names or groups (`performance`, `uncertainty`, `diversity`, `all`), with options in parentheses",
    "metric": "the metric to improve",
    "members": "the members to use as the ensemble, in this order; all if not given",
    "ensemble_sizes": "also evaluate ensembles of 1, 2, ... members",
    "limit": "use only the first N samples",
    "cache_logits": "type of the logits cached in the run folder: `float32`, `float16`, or `off` for no cache",
    "corruption_cache": "a folder for generated corrupted images",
    "device": "`cpu`, `cuda`, `cuda:1`; the best available device if not given",
    "executor": 'options of an executor, such as `{"name": "mesh", "processes": 2}`',
    # Single entry points.
    "calibrate.fraction": "fraction of the samples to fit on, drawn with the seed",
    "calibrate.split": "the held-out samples to fit on",
    "detect_ood.suites": 'names of suites with their data sets, such as `{"near": ["cifar100"]}`',
    "detect_ood.skip_missing": "skip data sets whose files are missing, with a message",
    "evaluate_calibration.exclude_calibration_ids": "leave out the samples that the calibration was fitted on",
    "from_dataset.train": "a map-style data set of `(input, label)` pairs",
    "from_dataset.test": "a map-style data set of `(input, label)` pairs",
    "from_tensors.train": "inputs and labels of the training samples",
    "from_tensors.test": "inputs and labels of the test samples",
    "classes": "number of classes",
    "shape": "shape of one input, channels first",
    "mean": "mean of each channel, for normalization",
    "std": "standard deviation of each channel, for normalization",
    "labels": "names of the classes",
    "name": "name of the data in tables and files",
    "remarks": "notes about the data that are stored with every result",
    "import_weights.recipe": "the recipe that describes data and model",
    "experiment": "the recipe, and the Python objects that replace what it names",
    "probe_landscape.probes": "names of probes, with options in parentheses",
    "probe_landscape.split": "`train`, `test` or `validation`",
    "probe_landscape.limit": "number of samples for all probes; each probe's own default if not given",
    "robustness.results": "results of `evaluate` on corrupted samples",
    "robustness.baseline": "error rates of a baseline by corruption and severity, for mCE",
    "select_members.size": "number of draws; with `unique`, of different members",
    "select_members.split": "the held-out samples to select on",
    "select_members.unique": "count different members instead of draws",
    "soup.accept": "whether a member that leaves the score equal is accepted",
    "soup.max_barrier": "largest rise of the loss between two members, in nats",
    "soup.split": "the held-out samples for greedy selection",
    "soup.strategy": "`uniform` averages all members, `greedy` those that improve the score",
    "plan.progress": "the progress of every member",
    "plan.partitions": "the state of every data partition",
    "plan.is_joint": "whether members are trained in one job",
    "plan.is_sequential": "whether a member starts when those before it have finished",
    "without": "members to leave out",
    "Ensemble.predict.combine": "`probability`, `logit`, `majority`",
    "x": "a batch of inputs, in the format of the data set",
    "Recipe.load.path": "a TOML file",
    "Recipe.load.changes": "overrides, such as `train.epochs=2`",
    "Recipe.parse.text": "a recipe as TOML",
    "Recipe.parse.where": "name of the source in error messages",
    "changes": "overrides, such as `train.epochs=2`",
    "Recipe.from_dict.tree": "the sections of a recipe",
    "Recipe.replaced.sections": "sections to replace or keys to change",
    "Recipe.for_member.number": "number of the member",
    "number": "number of the member",
    # What methods of several classes share.
    "at": "weights at which to evaluate; the member's own if not given",
    "batch": "a batch of samples",
    "logits": "logits `[..., B, C]`",
    "layers": "names of the layers whose inputs and outputs to record",
    "file": "path of the file",
    "rows": "indices of the samples",
    "ids": "ids of the samples",
    "fingerprint": "hash of the source of the samples",
    "hashes": "hashes of the members' weights",
    "Calibration.temperatures": "the fitted temperatures, for each order",
    "Calibration.order": "the order that sets, rejection and predictions use",
    "Calibration.sets": "thresholds of the conformal sets",
    "Calibration.threshold": "largest error probability of an accepted prediction",
    "order": "`pool` or `calibrate`",
    "EnsembleSelection.selection": "indices and weights of the selected members, and their scores",
    "Predictions.probability": "calibrated probability of the predicted class",
    "Predictions.ood_score": "out-of-distribution scores; larger is further out",
    "Predictions.prediction_set": "conformal sets, if the run is calibrated",
    "Predictions.abstain": "whether to abstain, if the run is calibrated",
    "Predictions.is_ood": "whether the OOD score is above the threshold of the alarm, if the run is calibrated",
    "Predictions.raw": "arrays without the calibration by name, such as `raw_entropy`, on request",
    "Predictions.label": "the predicted classes `[N]`",
    "Predictions.probabilities": "calibrated probabilities of all classes `[N, C]`",
    "Predictions.uncertainty": "entropy and mutual information, in nats",
    "Predictions.class_names": "names of the classes",
    "Predictions.names": "names of the inputs: files, or ids of samples",
    "Predictions.ood_score_name": "which out-of-distribution score it is",
    "Predictions.calibrated": "whether the run is calibrated",
    "Predictions.remark": "a remark about the predictions, such as a missing calibration",
    "Predictions.errors": "why an input has no prediction",
    "Predictions.members_queried": "number of members that a cascade queried for each input",
    "Predictions.to_records.probabilities": "include the probabilities of all classes",
    "Predictor.predict_prepared.inputs": "what `prepare` returned",
    "BatchResult.inputs": "number of inputs",
    "BatchResult.failed": "inputs with an error instead of a prediction",
    "BatchResult.abstained": "inputs for which the model abstains",
    "BatchResult.reused": "inputs that an earlier, interrupted job had predicted",
    "Calibration.cascade": "the fitted cascade",
    "Calibration.cascade_ids": "ids of the samples that the cascade was fitted on",
    "Calibration.ood_score": "the OOD score of predictions that ask for no other",
    "Calibration.ood_alarms": "threshold, interval of the false alarms, mean and standard deviation of each OOD score",
    "Calibration.ood_aurocs": "mean AUROC of each OOD score, if the score was chosen on OOD samples",
    "Calibration.conformal.alpha": "which of the fitted conformal sets to return",
    "ProbeOptions.metadata.module": "a member, to see whether it has BatchNorm",
    "SharpnessAware.perturbed.mask": "samples of the batch to which SAM applies `[B]`; all if not given",
    "SharpnessAware.step.closure": "computes the loss and its gradient, and returns the loss",
    "SharpnessAware.zero_grad.set_to_none": "set gradients to `None` instead of zero",
    "SharpnessAware.load_state_dict.state_dict": "a state of the wrapped optimizer",
    "SharpnessAware.add_param_group.param_group": "parameters and their options, as for the wrapped optimizer",
    "SharpBalancePartition.add_scores.member": "number of the member",
    "SharpBalancePartition.add_scores.scores": "its scores in the order of sample ids, in one array or in parts",
    "SharpBalancePartition.sam_set.member": "number of the member",
    "Callback.on_epoch_end.member": "number of the member",
    "Callback.on_checkpoint.member": "number of the member",
    "Callback.on_checkpoint.step": "steps completed in this epoch",
    "Callback.on_partition.partition": "the stored summary of the partition",
    "DataSplits.preprocessing": "how inputs of a predictor become inputs of the network",
    "DataSplits.keep_in_run": "store a copy of the samples in the run folder",
    "Run.begin.accept_changes": "resume although the data or the code have changed, and record the change",
    "Run.open.check_recipe": "check the digest of the recipe",
    "Run.accept_changes": "whether changed code is recorded instead of refused",
    "Run.update_info.values": "the new values by their key",
    "metadata": "properties that are stored with the values",
    "Run.store": "the object store that holds the run folder",
    "info": "format, hashes of the members, and properties of the data",
    "settings": "autotuned settings",
    "attempt": "number of earlier attempts",
    "timeout": "seconds to wait for the lock",
    "state": "state of a member: weights, optimizer, scheduler, random states",
    "weights": "weights by name",
    "epoch": "number of completed epochs",
    "best": "whether these are the best weights so far",
    "lines": "lines of the log",
    # Contracts of plug-ins.
    "Objective.loss": "maps the stacked outputs `[R, B, C]` to losses `[R, B]`",
    "Objective.output": "the output of one member; `logits` by default",
    "Objective.gather": "the rows that the loss needs: `none`, `members` or `batch`",
    "Objective.per_sample": "whether the loss is a mean over samples, so that a batch can be split",
    "Objective.active": "selects the members that take part in a step",
    "Objective.extra_inputs": "names of additional inputs of a batch, such as `unlabeled`",
    "Method.objective": "the outputs and the loss",
    "Method.update": "a generator that requests gradients and returns the descent direction",
    "Method.partition": "a data partition, if the method has one",
    "Method.member_order": "`parallel`, `sequential` or `chained`",
    "DataPartition.after": "completed epochs after which the samples are partitioned",
    "DataPartition.output": "the score of every training sample",
    "DataPartition.assign": "turns the scores of all members into SAM sets",
    "DataPartition.metadata": "properties of the partition that are stored in its summary",
    "DataPartition.prefix_method": "the method that this one equals before the first partition",
    "GradRequest.at": "the weights at which to compute the gradient; the current weights if not given",
    "GradRequest.rows": "the samples to use",
    "GradRequest.local": "use only the samples of this worker",
    "GradRequest.mean_over": "number of samples to divide by",
    "StepContext.size": "number of samples in the batch",
    "StepContext.lr": "current learning rate",
    "StepContext.peak_lr": "learning rate before any scheduler",
    "StepContext.min_fraction": "a part of the batch below this fraction is empty or too small to be trained on alone",
    "StepContext.sam_set": "for each sample of the batch, whether the member applies SAM to it",
    "Metric.update": "turns the outputs of a batch into sums",
    "Metric.compute": "turns the sums over all batches into named estimates",
    "Metric.output": "the output function that runs for each member",
    "Metric.reduce": "`sum` adds over batches and processes, `cat` keeps one row per sample",
    "Metric.min_members": "minimum number of members",
    "Metric.higher_is_better": "`None` if neither direction is better",
    "Metric.group": "`performance`, `uncertainty` or `diversity`",
    "default": "whether `all` includes it",
    "percent": "whether tables show percent",
    "definition": "conventions needed to compare the value with other implementations",
    "group": "the group of the metric",
    "higher_is_better": "`None` if neither direction is better",
    "Probe.run": "computes the values on a `LossSurface`",
    "Probe.passes": "forward and backward passes per sample, for the time estimate",
    "Probe.samples": "number of samples by default",
    "Probe.scale_invariant": "whether rescaling adjacent layers leaves the value unchanged",
    "Estimate.value": "the value",
    "Estimate.stderr": "standard error over samples or members, if there is one",
    "Estimate.mc_stderr": "standard error over random draws, if there are any",
    "Batch.x": "inputs `[B, ...]`",
    "Batch.y": "labels `[B]`",
    "Batch.index": "ids of the samples `[B]`",
    "Batch.seed": "seed of all random choices in this step",
    "Batch.extra": "additional inputs, such as unlabeled samples",
    "MetricResult.metric": "name of the metric",
    "MetricResult.split": "the samples",
    "MetricResult.rows": "estimates by row name",
    "MetricResult.weights": "a description of the weights",
    "MetricResult.hashes": "hashes of the weights",
    "MetricResult.data": "name, fingerprint and number of the samples",
    "DataSplits.train": "source of the training samples",
    "DataSplits.test": "source of the test samples",
    "Job.members": "the members that the job trains",
    "Job.start": "epoch and step at which it starts",
    "Job.stop": "epoch at which it ends",
    "Job.kind": "`train` or `assign`",
    "Job.attempt": "number of earlier attempts",
    "PartitionStatus.epoch": "completed epochs before the partition",
    "PartitionStatus.scored": "members whose scores exist",
    "PartitionStatus.assigned": "whether the SAM sets are valid",
    "PartitionStatus.without": "members that failed before the partition",
}
HIDDEN = ("self", "cls")


class ParameterTables(griffe.Extension):
    """Add a parameter section to the docstrings of functions and data classes."""

    def on_function(self, *, func: griffe.Function, loader: Any, **kwargs: Any) -> None:
        owner = func.name if func.parent is None or func.parent.is_module else f"{func.parent.name}.{func.name}"
        if not func.name.startswith("_"):
            _add_table(func, owner)

    def on_class(self, *, cls: griffe.Class, loader: Any, **kwargs: Any) -> None:
        _add_table(cls, cls.name)


def parameters_of(owner: Any) -> list[Any]:
    """Return the parameters of a function, or the fields of a data class."""
    if owner.is_function:
        return [each for each in owner.parameters if each.name not in HIDDEN]
    if "dataclass" in owner.labels or any("dataclass" in str(each.value) for each in owner.decorators):
        fields = [each for each in owner.attributes.values() if each.annotation and not each.name.startswith("_")]
        return [each for each in fields if "property" not in each.labels]
    return []


def _add_table(owner: Any, name: str) -> None:
    parameters = parameters_of(owner)
    if owner.docstring is None or not parameters:
        return
    sections = owner.docstring.parsed
    written = [section for section in sections if section.kind is griffe.DocstringSectionKind.parameters]
    texts = {
        key.strip(): each.description for section in written for each in section.value for key in each.name.split(",")
    }
    rows = []
    for each in parameters:
        value = each.default if isinstance(each, griffe.Parameter) else each.value
        text = texts.get(each.name) or MEANINGS.get(f"{name}.{each.name}", MEANINGS.get(each.name, ""))
        rows.append(griffe.DocstringParameter(each.name, description=text, annotation=each.annotation, value=value))
    if written:
        written[0].value = rows
    elif any(row.description for row in rows):  # otherwise the table says no more than the signature
        sections.append(griffe.DocstringSectionParameters(rows))
