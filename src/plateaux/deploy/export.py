"""Export a run as a bundle: one graph for all answers as ONNX, compared with the members first."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plateaux.core.errors import RunError, first_line
from plateaux.core.imports import optional_import
from plateaux.core.progress import Progress, WorkDone, log_messages
from plateaux.deploy.agreement import SCORE_TOLERANCE, TOLERANCE, Agreement, compare_answers
from plateaux.deploy.bundle import INPUT, OUTPUT, Bundle, check_golden, list_files, make_onnx_backend, write_manifest
from plateaux.deploy.comparison_inputs import random_inputs, sample_inputs
from plateaux.deploy.graph import AnswerGraph, StageGraph
from plateaux.deploy.manifest import (
    CARD,
    GOLDEN,
    ONNX,
    SHARED,
    CalibrationRecord,
    CascadeRecord,
    GraphCheck,
    Manifest,
    SetRule,
    expected_outputs,
)
from plateaux.deploy.measured import measured_numbers
from plateaux.deploy.model_card import model_card
from plateaux.deploy.onnx_backend import EXTRA
from plateaux.ensembles.answers import AnswerSettings
from plateaux.prediction.calibration import Calibration
from plateaux.prediction.load import ModuleBackend, load_run_predictor
from plateaux.prediction.predictor import AnswerOptions, Backend, Predictor
from plateaux.prediction.stage_backend import stage_inputs, stage_outputs
from plateaux.storage.remote_store import open_store
from plateaux.storage.run import Run, RunLike, own_version
from plateaux.storage.store import Store

BATCH_SIZES = (1, 7, 64)
GOLDEN_SAMPLES = 4
TRACED_BATCH = 3  # torch.export treats batches of 0 and 1 as special
MAX_BATCH = 1 << 20
EXPORTED, CONVERTED = 17, 77  # percent of the time of an export, as measured with small ResNets

Arrays = Mapping[str, NDArray[Any]]


def export(
    run: RunLike,
    out: str | Path,
    *,
    ood_score: str | None = None,
    alpha: float | None = None,
    raw: bool = False,
    license: str = "",
    golden: Literal["test", "random"] = "test",
    intended_use: str = "",
    progress: Progress = log_messages,
) -> Bundle:
    """Write a run as a bundle that answers without the code of the model.

    The graphs are run at batch sizes 1, 7, and 64 on test samples. If a probability differs from that of the members
    by more than 1e-5, nothing is written. A run with a cascade becomes one ONNX graph per stage.

    Args:
        run: A run, its folder, or its URL.
        out: The folder or URL of the bundle; it must be empty.
        ood_score: The OOD score to compute; see `plateaux.ensembles.ood_scores`. None: that of the calibration, by
            default `max_probability`.
        alpha: Which of the fitted conformal sets to return. None: the first.
        raw: Also compute the answers without the calibration: `raw_probability`, `raw_entropy`, ...
        license: The license of the weights, such as "CC-BY-4.0"; it is only recorded.
        golden: The inputs to store, which are computed again at load: four test samples, or random inputs if no
            sample of the data may leave your hands. The graphs are compared on test samples in both cases.
        intended_use: What the model is meant for, in a sentence; it is part of the model card, `README.md`.
        progress: Called with progress events.
    """
    for name in ("onnx", "onnxscript", "onnxruntime"):
        optional_import(name, extra=EXTRA)
    store = open_store(out)
    if list_files(store):
        raise RunError(f"{out} is not empty. Export to another folder, or delete it first")
    opened = Run.open(run)
    predictor = load_run_predictor(opened, AnswerOptions(ood_score, alpha, raw), device="cpu")
    assert isinstance(predictor.backend, ModuleBackend)
    settings, contract = predictor.backend.settings, predictor.contract
    calibration, cascade = _calibration_record(opened, settings), _cascade_record(settings)
    description, samples = sample_inputs(opened, contract, sum(BATCH_SIZES))
    origin, stored = (description, samples) if golden == "test" else random_inputs(contract, sum(BATCH_SIZES))
    graphs, backend = _make_graphs(predictor.backend, contract.classes, samples, cascade, progress)
    check = _check(ONNX if cascade is None else "stages", backend, predictor.backend, samples, description, calibration)
    manifest = Manifest(
        contract=contract,
        outputs=tuple(expected_outputs(contract.classes)[name] for name in predictor.outputs),
        members=tuple(opened.trained_members()),
        ood_score=settings.ood_score,
        calibration=calibration,
        cascade=cascade,
        remark=predictor.remark,
        golden=origin,
        measured=measured_numbers(opened),
        checks=(check,),
        license=license,
        intended_use=intended_use,
        plateaux=own_version(),
        files={},
    )
    for file, content in graphs.items():
        store.put(file, content)
    _write_weights(store, opened)
    # Where rounding decides how many members are queried, another machine may find other answers.
    rows = np.flatnonzero(~predictor.backend.near_stop(stored, SCORE_TOLERANCE))[:GOLDEN_SAMPLES]
    if not len(rows):
        raise RunError("All test samples are at the threshold of the cascade. Calibrate again with other --stages")
    _write_golden(store, predictor, {name: values[rows] for name, values in stored.items()})
    store.put(CARD, model_card(manifest).encode())
    write_manifest(store, manifest)
    bundle = Bundle.open(out)
    check_golden(backend, bundle.read(GOLDEN), bundle.manifest, out)
    progress(WorkDone(100, 100))
    return bundle


def _make_graphs(
    backend: ModuleBackend,
    classes: int,
    samples: Arrays,
    cascade: CascadeRecord | None,
    progress: Progress,
) -> tuple[dict[str, bytes], Backend]:
    """Return the files of all graphs, and a backend that computes with them."""
    ensemble, settings, inputs, outputs = backend.ensemble, backend.settings, list(samples), backend.settings.outputs
    if cascade is None:
        program = export_program(AnswerGraph(ensemble, settings, inputs), samples)
        progress(WorkDone(EXPORTED, 100))
        graphs = {ONNX: to_onnx(program, inputs, outputs)}
        progress(WorkDone(CONVERTED, 100))
        return graphs, make_onnx_backend(graphs, inputs, outputs, None, len(ensemble))
    graphs, begin, ends = {}, 0, cascade.ends(len(ensemble))
    for number, end in enumerate(ends):
        graph = StageGraph(ensemble, settings, inputs, begin, end, classes)
        names = stage_inputs(inputs, number), stage_outputs(outputs, is_last=end == ends[-1])
        graphs[f"stages/{number + 1}.onnx"] = to_onnx(export_program(graph, samples), *names)
        begin = end
        progress(WorkDone(CONVERTED * (number + 1) / len(ends), 100))
    return graphs, make_onnx_backend(graphs, inputs, outputs, cascade, len(ensemble))


def export_program(graph: AnswerGraph, samples: Arrays) -> torch.export.ExportedProgram:
    """Return the graph as a program of torch with a dynamic batch size, without traces of this machine."""
    # Shapes and dtypes matter, values do not: a program contains the inputs it was traced with.
    inputs = tuple(torch.from_numpy(np.zeros_like(samples[name][:TRACED_BATCH])) for name in graph.names)
    if isinstance(graph, StageGraph) and graph.begin:
        inputs = (*inputs, torch.zeros(TRACED_BATCH, graph.begin, graph.classes))
    batch = torch.export.Dim("batch", min=1, max=MAX_BATCH)
    try:
        with torch.no_grad(), _no_warnings():
            program = torch.export.export(graph, inputs, dynamic_shapes=(tuple({0: batch} for _ in inputs),))
    except Exception as problem:  # a model may fail in any way
        raise RunError(
            f"torch.export cannot export the model with a variable batch size ({type(problem).__name__}: "
            f"{first_line(problem)[:300]}). Its forward pass must not branch on values, nor fix the batch size"
        ) from problem
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            node.meta.pop("stack_trace", None)  # file names of this machine
    return program


def to_onnx(program: torch.export.ExportedProgram, inputs: Sequence[str], outputs: Sequence[str]) -> bytes:
    """Return a program as an ONNX file without external data."""
    try:
        with _no_warnings():
            converted = torch.onnx.export(
                program, (), dynamo=True, external_data=False, verbose=False,
                input_names=list(inputs), output_names=list(outputs),
            )  # fmt: skip
        assert converted is not None
        proto = converted.model_proto
        _remove_metadata(proto.graph)
        content: bytes = proto.SerializeToString(deterministic=True)
    except Exception as problem:
        raise RunError(
            f"The model cannot be converted to ONNX ({type(problem).__name__}: {first_line(problem)[:300]}). The usual "
            "causes are an operator without a conversion, and more than 2 GB of weights"
        ) from problem
    return content


def compare_backends(
    expected: Backend, found: Backend, samples: Arrays, calibration: CalibrationRecord | None, what: str
) -> Agreement:
    """Return how far a backend is from another one on batches of 1, 7, and 64 samples."""
    total, start = Agreement(), 0
    for size in BATCH_SIZES:
        batch = {name: values[start : start + size] for name, values in samples.items()}
        start += size
        try:
            answers = found(batch)
        except Exception as problem:
            raise RunError(f"{what} fails at batch size {size} ({first_line(problem)[:300]})") from problem
        near = expected.near_stop(batch, TOLERANCE) if isinstance(expected, ModuleBackend) else None
        total += compare_answers(expected(batch), answers, calibration, f"{what} at batch size {size}", near)
    return total


def _check(
    file: str,
    backend: Backend,
    expected: Backend,
    samples: Arrays,
    description: str,
    calibration: CalibrationRecord | None,
) -> GraphCheck:
    agreement = compare_backends(expected, backend, samples, calibration, f"The exported {file}")
    return GraphCheck(file, description, BATCH_SIZES, agreement.max_difference, agreement.near_threshold)


def _calibration_record(run: Run, settings: AnswerSettings) -> CalibrationRecord | None:
    if settings.temperatures is None:
        return None
    calibration, sets = Calibration.read(run), settings.conformal
    rule = None if sets is None else SetRule(
        sets.kind, sets.alpha, sets.threshold if math.isfinite(sets.threshold) else None, sets.k_reg, sets.penalty,
        sets.never_empty, sets.samples,
    )  # fmt: skip
    return CalibrationRecord(
        settings.temperatures.order, tuple(settings.temperatures.values), calibration.split, len(calibration.ids), rule,
        settings.max_error_probability, calibration.ood_alarms[settings.ood_score],
    )  # fmt: skip


def _cascade_record(settings: AnswerSettings) -> CascadeRecord | None:
    fitted = settings.cascade
    if fitted is None:
        return None
    return CascadeRecord(
        fitted.stages, fitted.threshold, fitted.kind, fitted.max_harm, fitted.confidence, fitted.samples, fitted.queried
    )


def _write_weights(store: Store, run: Run) -> None:
    for number in run.trained_members():
        store.put_tensors(f"members/{number}.safetensors", run.weights(number), {"format": "pt"}, record=False)
    if shared := run.shared():
        store.put_tensors(SHARED, shared, {"format": "pt"}, record=False)


def _write_golden(store: Store, predictor: Predictor, inputs: Arrays) -> None:
    outputs = expected_outputs(predictor.contract.classes)
    tensors: dict[str, Tensor] = {f"{INPUT}{name}": torch.from_numpy(values.copy()) for name, values in inputs.items()}
    for name, values in predictor.backend(inputs).items():
        tensors[f"{OUTPUT}{name}"] = torch.from_numpy(np.asarray(values).astype(outputs[name].dtype))
    store.put_tensors(GOLDEN, tensors, record=False)


def _remove_metadata(graph: Any) -> None:
    """Remove names of modules and files of this machine, which conversions add to every node."""
    graph.ClearField("doc_string")
    graph.ClearField("metadata_props")
    for part in (*graph.node, *graph.initializer, *graph.value_info, *graph.input, *graph.output):
        part.ClearField("doc_string")
        part.ClearField("metadata_props")
    for node in graph.node:
        for attribute in node.attribute:
            for inner in [*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs]:
                _remove_metadata(inner)


def _no_warnings() -> warnings.catch_warnings:
    """Return a context without warnings: those of conversions are about code of torch and of the model."""
    return warnings.catch_warnings(action="ignore")
