"""`load_predictor` for runs and bundles. A bundle is loaded without importing torch."""

from __future__ import annotations

from plateaux.config.components import Components
from plateaux.core.errors import RecipeError, RunError
from plateaux.deploy.bundle import Bundle
from plateaux.deploy.manifest import MANIFEST
from plateaux.prediction.predictor import MAX_BATCH, AnswerOptions, Predictor
from plateaux.storage.remote_store import open_store
from plateaux.storage.run import Run, RunLike


def load_predictor(
    source: RunLike | Bundle,
    *,
    device: str | None = None,
    threads: int | None = None,
    ood_score: str | None = None,
    alpha: float | None = None,
    raw: bool = False,
    max_batch: int = MAX_BATCH,
) -> Predictor:
    """Return the ensemble of a run or of a bundle as a predictor that checks its inputs and applies the calibration.

    `load_predictor(run).ensemble` is the ensemble as an `nn.Module`. A bundle has none.

    Args:
        source: A run, its folder, or its URL; or a bundle that `export` wrote, its folder, or its URL.
        device: "cpu", "cuda", "cuda:1", ... None: the best available device. A bundle runs on the CPU.
        threads: Number of CPU threads of a call. None: the setting of torch or of onnxruntime.
        ood_score: The OOD score to compute; see `plateaux.ensembles.ood_scores`. None: that of the calibration or of
            the bundle, by default `max_probability`.
        alpha: Which of the fitted conformal sets to return. None: the first, or that of the bundle.
        raw: Also return the answers without the calibration: `raw_probability`, `raw_entropy`, ...
        max_batch: The largest number of inputs of one forward pass.
    """
    if threads is not None and threads < 1:
        raise RecipeError(f"threads = {threads}: give a number of at least 1")
    opened, options = open_source(source), AnswerOptions(ood_score, alpha, raw)
    if isinstance(opened, Bundle):
        if device not in (None, "cpu"):
            raise RecipeError(f"device = {device!r}: the graph of a bundle runs on the CPU. Leave it out")
        _check_settings(opened, options)
        return opened.predictor(opened.onnx_backend(threads=threads), max_batch=max_batch)
    from plateaux.prediction.load import load_run_predictor

    return load_run_predictor(opened, options, device=device, threads=threads, max_batch=max_batch)


def open_source(source: RunLike | Bundle, components: Components | None = None) -> Run | Bundle:
    """Return a run or a bundle, opened."""
    if isinstance(source, Bundle):
        return source
    return Run.open(source, components) if isinstance(source, Run) or not is_bundle(source) else Bundle.open(source)


def is_bundle(root: RunLike) -> bool:
    """Return whether a folder or URL is a bundle; an error if it is neither a bundle nor a run."""
    store = open_store(str(root))
    has_run, has_manifest = store.has("run.json"), store.has(MANIFEST)
    if not has_run and not has_manifest:
        raise RunError(
            f"{root} is neither a run nor a bundle: it has no run.json and no {MANIFEST}. `plateaux train` writes "
            "runs, and `plateaux export` bundles"
        )
    return has_manifest and not has_run


def _check_settings(bundle: Bundle, options: AnswerOptions) -> None:
    """Raise an error for settings that were fixed at export."""
    manifest, score, alpha = bundle.manifest, options.ood_score, options.alpha
    if score not in (None, manifest.ood_score):
        raise RecipeError(
            f"ood_score = {score!r}: this bundle computes {manifest.ood_score!r}. Export it again with "
            f"--ood-score {score}"
        )
    sets = None if manifest.calibration is None else manifest.calibration.sets
    if alpha is not None and (sets is None or sets.alpha != alpha):
        has = "has no prediction sets" if sets is None else f"has the sets of alpha = {sets.alpha:g}"
        raise RecipeError(f"alpha = {alpha}: this bundle {has}. Export it again with --alpha {alpha}")
    if options.raw and "raw_label" not in {each.name for each in manifest.outputs}:
        raise RecipeError("raw = True: this bundle has no answers without the calibration. Export it again with --raw")
