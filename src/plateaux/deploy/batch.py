"""Batch prediction: any number of inputs to one file or folder, in parts, resumable, over processes or a cluster.

The content of a part depends only on its inputs, the model, and the settings, so a resumed job, or one with another
number of processes, writes the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

from plateaux.config.components import NO_COMPONENTS, Components
from plateaux.core.errors import DataError, PlateauxError, RecipeError, check_names
from plateaux.core.progress import Progress, ProgressEvent, WorkDone
from plateaux.deploy.batch_parts import check_plan, finish, is_complete, write_part
from plateaux.deploy.bundle import Bundle
from plateaux.deploy.load_predictor import load_predictor, open_source
from plateaux.distributed.executors.ray import RayExecutor
from plateaux.distributed.process_pool import run_pool
from plateaux.prediction.contract import InputContract
from plateaux.prediction.input_files import InputReader, InputRef, list_inputs, split_parts
from plateaux.prediction.inputs import PreparedInputs, concatenate_inputs, prepare
from plateaux.prediction.predictions import check_suffix, encode, with_errors
from plateaux.prediction.predictor import AnswerOptions, Predictor
from plateaux.storage.run import Run, RunLike

PART_SIZE = 1024
NO_CHOICE = AnswerOptions()
MAX_RETRIES = 10  # of a part whose node is lost
FOLDER_SUFFIX = ".parquet"  # of the parts in a folder


@dataclass(frozen=True, slots=True)
class BatchJob:
    """What a worker needs to predict inputs."""

    model_location: str
    suffix: str
    columns: tuple[str, ...] = ()
    components: Components = NO_COMPONENTS
    device: str | None = None
    threads: int | None = None
    answers: AnswerOptions = NO_CHOICE
    sha256: str | None = None  # of the bundle that was opened: a worker must find the same one


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """How inputs are read and distributed; `plateaux.predict` describes the fields."""

    columns: Sequence[str] = ()
    threads: int | None = None
    processes: int = 1
    executor: Literal["ray"] | None = None
    address: str | None = None
    part_size: int = PART_SIZE

    def __post_init__(self) -> None:
        if self.processes < 1 or self.part_size < 1:
            raise RecipeError(f"processes = {self.processes}, part_size = {self.part_size}: both must be at least 1")
        if self.address is not None and self.executor is None:
            raise RecipeError(f"address = {self.address!r} is that of a Ray cluster; use it with executor = 'ray'")


@dataclass(frozen=True, slots=True)
class BatchPart:
    """Some consecutive inputs, predicted together."""

    number: int
    refs: tuple[InputRef, ...]

    def __str__(self) -> str:
        return f"part {self.number} ({len(self.refs)} inputs)"


@dataclass(frozen=True, slots=True)
class BatchResult:
    """The result of a batch prediction."""

    out: Path
    inputs: int
    failed: int  # inputs with an error instead of a prediction
    abstained: int  # inputs for which the model abstains
    reused: int  # inputs that an earlier, interrupted job had predicted


def predict_files(
    source: RunLike | Bundle,
    inputs: str | Path | Sequence[str | Path],
    out: Path,
    answers: AnswerOptions,
    *,
    device: str | None,
    settings: Mapping[str, Any],
    progress: Progress,
) -> BatchResult:
    """Predict inputs, and write one row for each; `plateaux.predict` describes the arguments."""
    check_names("batch", settings, BatchOptions.__dataclass_fields__)
    batch = BatchOptions(**settings)
    suffix = check_suffix(out) if out.suffix else FOLDER_SUFFIX
    is_parallel = batch.processes > 1 or batch.executor is not None
    threads = 1 if batch.threads is None and is_parallel else batch.threads
    columns, opened = tuple(batch.columns), open_source(source)
    contract, identity = _identify(opened)
    components, digest = (NO_COMPONENTS, opened.sha256) if isinstance(opened, Bundle) else (opened.components, None)
    job = BatchJob(str(opened.store.root), suffix, columns, components, device, threads, answers, digest)
    paths = [inputs] if isinstance(inputs, str | Path) else inputs
    refs = list_inputs([str(item) for item in paths], contract, columns)
    parts = [BatchPart(number, some) for number, some in split_parts(refs, batch.part_size)]
    folder = out.with_name(f"{out.name}.parts") if out.suffix else out
    check_plan(folder, _describe(identity, job, refs, batch.part_size))
    missing = [part for part in parts if not is_complete(folder, part.number, suffix)]
    reused = len(refs) - sum(len(part.refs) for part in missing)
    if missing:
        _load(job)  # fail before any work if the model cannot be loaded
        _predict_parts(job, missing, folder, batch, _counter(progress, reused, len(refs)))
    records = finish(out, folder, len(parts), suffix)
    failed, abstained = (sum(int(record.get(name, 0)) for record in records) for name in ("failed", "abstained"))
    return BatchResult(out, len(refs), failed, abstained, reused)


def _predict_parts(job: BatchJob, parts: list[BatchPart], folder: Path, batch: BatchOptions, count: Progress) -> None:
    if batch.executor == "ray":
        _predict_on_ray(job, parts, folder, batch.address, count)
        return
    run_part = partial(store_part, job, str(folder))
    if batch.processes == 1:
        for part in parts:
            run_part(part, count)
        return
    failures = run_pool(parts, run_part, count, processes=batch.processes)
    if failures:
        raise failures[0].problem


def _predict_on_ray(job: BatchJob, parts: list[BatchPart], folder: Path, address: str | None, count: Progress) -> None:
    """Predict parts on a cluster. Results return to this process, which writes them; lost tasks are repeated."""
    executor = RayExecutor(address, cpus=1.0, gpus=0.0, retries=MAX_RETRIES, processes=1, data_parallel=1)
    try:
        for part, result in executor.map_reduce([[part] for part in parts], predict_part, _first_result, job):
            write_part(folder, part.number, job.suffix, *result)
            count(WorkDone(len(part.refs), len(part.refs)))
    finally:
        executor.close()


def _first_result(_: BatchJob, __: BatchPart, result: Any) -> Any:
    return result


def store_part(
    job: BatchJob, folder: str, part: BatchPart, progress: Progress, *, device: str | None = None, processes: int = 1
) -> None:
    """Predict a part and write it; the function of a process in the pool."""
    write_part(Path(folder), part.number, job.suffix, *predict_part(job, part))
    progress(WorkDone(len(part.refs), len(part.refs)))


def predict_part(job: BatchJob, part: BatchPart) -> tuple[bytes, dict[str, int]]:
    """Return the file with the predictions of a part, and how many inputs failed or are abstained from."""
    predictor, reader = _load(job)
    prepared: list[PreparedInputs] = []
    errors: dict[int, str] = {}
    for position, ref in enumerate(part.refs):
        try:
            one = prepare(reader.read(ref), predictor.contract)
            if len(one) != 1:
                raise DataError(f"The input has {len(one)} rows. Expected: one input")
            prepared.append(one)
        except RecipeError:
            raise
        except (PlateauxError, ValueError, TypeError) as error:  # ValueError: a cell that is not a number
            errors[position] = str(error)
    found = predictor.predict_prepared(concatenate_inputs(prepared)) if prepared else None
    rows = with_errors(predictor.empty() if found is None else found, errors)
    abstained = 0 if found is None or found.abstain is None else int(found.abstain.sum())
    named = replace(rows, names=tuple(ref.name for ref in part.refs))
    return encode(named, job.suffix), {"rows": len(part.refs), "failed": len(errors), "abstained": abstained}


@lru_cache(maxsize=1)
def _load(job: BatchJob) -> tuple[Predictor, InputReader]:
    root, digest = job.model_location, job.sha256
    source = open_source(root, job.components) if digest is None else Bundle.open(root, sha256=digest)
    predictor = load_predictor(source, device=job.device, threads=job.threads, **asdict(job.answers))
    return predictor, InputReader(predictor.contract, job.columns)


def _counter(progress: Progress, done: int, total: int) -> Progress:
    """Return a callback that adds up the work of parts."""

    def count(event: ProgressEvent) -> None:
        nonlocal done
        if isinstance(event, WorkDone):
            done += int(event.done)
            event = WorkDone(done, total)
        progress(event)

    return count


def _identify(source: Run | Bundle) -> tuple[InputContract, dict[str, Any]]:
    """Return the input contract of a run or a bundle, and what identifies its predictions."""
    if isinstance(source, Bundle):
        manifest = source.manifest
        return manifest.contract, {"files": {name: record.sha256 for name, record in manifest.files.items()}}
    weights = [source.weights_hash(number) for number in source.trained_members()]
    return InputContract.from_run(source), {"weights": weights, "calibration": source.info.calibration_digest}


def _describe(identity: dict[str, Any], job: BatchJob, refs: Sequence[InputRef], part_size: int) -> dict[str, Any]:
    """Return what a resumed job must have in common with the interrupted one."""
    names = blake2b(digest_size=16)
    for ref in refs:
        names.update(f"{ref.name}\n".encode())
    return {
        "inputs": {"count": len(refs), "names": names.hexdigest()},
        "model": identity,
        "settings": {
            "suffix": job.suffix,
            "part_size": part_size,
            "columns": list(job.columns),
            **asdict(job.answers),
        },
    }
