"""A bundle: the folder that `plateaux export` writes, opened as untrusted data.

| file | content |
|---|---|
| `manifest.json` | inputs, outputs, calibration, measured numbers, size and SHA-256 of every other file |
| `model.onnx` | one graph for all answers |
| `stages/N.onnx` | instead of it: one graph for each stage of a cascade |
| `README.md` | the model card |
| `members/N.safetensors`, `shared.safetensors` | the weights, which the graphs do not need |
| `golden.safetensors` | inputs and their answers, which are computed again when a predictor is loaded |

The manifest is read first. Then the name, the size, and the SHA-256 of every file are checked. A file that the manifest
does not name, a missing one, a link, and a changed byte are errors. Importing this module does not import torch.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from plateaux.core.errors import RunError, StorageError
from plateaux.deploy.agreement import compare_answers
from plateaux.deploy.manifest import (
    ADVICE,
    GOLDEN,
    MANIFEST,
    MAX_BYTES,
    NAMES,
    CascadeRecord,
    FileRecord,
    Manifest,
)
from plateaux.deploy.onnx_backend import OnnxBackend
from plateaux.prediction.predictor import MAX_BATCH, Backend, Predictor
from plateaux.prediction.stage_backend import QUERIED, StageBackend, stage_inputs, stage_outputs
from plateaux.storage.digests import hash_sha256
from plateaux.storage.local_store import LocalStore
from plateaux.storage.remote_store import open_store
from plateaux.storage.run import RunLike
from plateaux.storage.safe_files import open_folder, walk_files
from plateaux.storage.store import Store

INPUT, OUTPUT = "input.", "output."  # prefixes of the names of golden tensors


@dataclass(frozen=True, slots=True)
class Bundle:
    """A folder whose manifest, file names, sizes, and digests were checked."""

    store: Store
    manifest: Manifest
    sha256: str  # of the manifest, which has the digests of all other files

    @classmethod
    def open(cls, root: RunLike, *, sha256: str | None = None) -> Bundle:
        """Open a bundle by its folder or URL, and check every file. Nothing in it is executed.

        Digests show that a bundle is complete, not who wrote it. For that, give the digest that its author published.

        Args:
            root: The folder or URL of the bundle.
            sha256: The digest that the bundle must have, as `export`, `push`, and `pull` print it. None: any.
        """
        store = open_store(str(root))
        if not store.has(MANIFEST):
            what = f"{root} -o BUNDLE" if store.has("run.json") else f"RUN -o {root}"
            raise RunError(f"{root} is not a bundle: it has no {MANIFEST}. `plateaux export {what}` writes one")
        with store.open_reader(MANIFEST) as file:
            content = file.read(MAX_BYTES + 1)
        digest = check_pin(content, sha256, store.root)
        bundle = cls(store, Manifest.from_bytes(content, store.root / MANIFEST), digest)
        bundle._check_files()
        return bundle

    def read(self, name: str) -> bytes:
        """Return the content of a file; the bytes that were checked are the ones that are returned."""
        record = self.manifest.files.get(name)
        if record is None:
            raise RunError(f"{self.store.root} has no {name}. It was exported without it")
        with self.store.open_reader(name) as file:
            content = io.BytesIO(file.read(record.bytes + 1))
        self._check_content(name, content)
        return content.getvalue()

    def predictor(self, backend: Backend, *, max_batch: int = MAX_BATCH) -> Predictor:
        """Return a predictor that computes with a backend, after it reproduced the golden outputs."""
        manifest = self.manifest
        check_golden(backend, self.read(GOLDEN), manifest, self.store.root)
        return Predictor(
            backend,
            manifest.contract,
            outputs=[each.name for each in manifest.outputs],
            ood_score=manifest.ood_score,
            calibrated=manifest.calibration is not None,
            remark=manifest.remark,
            max_batch=max_batch,
        )

    def golden_inputs(self) -> dict[str, NDArray[Any]]:
        """Return the inputs that the bundle is checked with, as arrays of the graph."""
        from safetensors.numpy import load

        tensors = load(self.read(GOLDEN))
        return {name.removeprefix(INPUT): values for name, values in tensors.items() if name.startswith(INPUT)}

    def onnx_backend(self, *, threads: int | None = None) -> Backend:
        """Return the ONNX graph, or the graphs of a cascade as one backend."""
        manifest = self.manifest
        graphs = {name: self.read(name) for name in manifest.graphs()}
        names = list(manifest.contract.inputs), [each.name for each in manifest.outputs]
        return make_onnx_backend(
            graphs, *names, manifest.cascade, len(manifest.members), threads=threads, root=self.store.root
        )

    def _check_files(self) -> None:
        named, root = self.manifest.files, self.store.root
        for name in sorted(list_files(self.store) - {MANIFEST} - set(named)):
            raise StorageError(f"{root / name} does not belong to the bundle: its manifest does not name it; remove it")
        for name in named:
            with self.store.open_reader(name) as file:
                self._check_content(name, file)

    def _check_content(self, name: str, file: IO[bytes]) -> None:
        record = self.manifest.files[name]
        # The size first: a sparse file of a terabyte takes no space, but hours to hash.
        if file.seek(0, os.SEEK_END) != record.bytes or FileRecord(*hash_sha256(file)) != record:
            raise StorageError(
                f"{self.store.root / name} is damaged or was exchanged: its size or its SHA-256 is not that of the "
                f"manifest; {ADVICE}"
            )


def check_pin(manifest: bytes, sha256: str | None, root: object) -> str:
    """Return the SHA-256 of the content of a manifest. Raise a `StorageError` if another one is expected."""
    found = hash_sha256(io.BytesIO(manifest))[1]
    if sha256 not in (None, found):
        raise StorageError(f"{root} is another bundle: its SHA-256 is {found}. Expected: {sha256}")
    return found


def make_onnx_backend(
    graphs: Mapping[str, bytes],
    inputs: Sequence[str],
    outputs: Sequence[str],
    cascade: CascadeRecord | None,
    members: int,
    *,
    threads: int | None = None,
    root: object = None,
) -> Backend:
    """Return graphs by file name, in order, as a backend: one graph, or the stages of a cascade."""
    files = {name: name if root is None else f"{root}/{name}" for name in graphs}
    if cascade is None:
        ((name, content),) = graphs.items()
        return OnnxBackend(content, inputs, outputs, threads=threads, name=files[name])
    answers, last = [name for name in outputs if name != QUERIED], len(graphs) - 1
    stages = [
        OnnxBackend(
            content,
            stage_inputs(inputs, stage),
            stage_outputs(answers, is_last=stage == last),
            threads=threads,
            name=files[name],
        )
        for stage, (name, content) in enumerate(graphs.items())
    ]
    return StageBackend(stages, cascade.ends(members), cascade.threshold or 0.0)


def list_files(store: Store) -> set[str]:
    """Return the names of all files of a folder, also of hidden ones; a link or a device is an error."""
    if not isinstance(store, LocalStore):
        return set(store.names())
    try:
        with open_folder(store.root) as folder:
            return {name for name, _ in walk_files(folder, hidden=True)}
    except FileNotFoundError:
        return set()
    except OSError as problem:
        raise StorageError(f"{store.root} cannot be read: {problem.strerror or problem}") from None


def write_manifest(store: Store, manifest: Manifest) -> Manifest:
    """Complete a bundle whose other files are written: record their digests, and write the manifest."""
    files = {}
    for name in sorted(list_files(store)):
        if not NAMES.fullmatch(name):
            raise StorageError(f"{store.root / name} does not belong to a bundle. Export to another folder")
        with store.open_reader(name) as file:
            files[name] = FileRecord(*hash_sha256(file))
    complete = replace(manifest, files=files)
    store.put(MANIFEST, complete.to_bytes())
    return complete


def check_golden(backend: Backend, content: bytes, manifest: Manifest, root: object) -> None:
    """Raise a `StorageError` if a backend does not reproduce the golden outputs of a bundle."""
    from safetensors.numpy import load

    try:
        tensors: dict[str, NDArray[Any]] = load(content)
    except Exception as problem:
        raise StorageError(f"{root}/{GOLDEN} is damaged: {problem}; {ADVICE}") from None
    inputs = {name.removeprefix(INPUT): values for name, values in tensors.items() if name.startswith(INPUT)}
    expected = {name.removeprefix(OUTPUT): values for name, values in tensors.items() if name.startswith(OUTPUT)}
    names = {each.name for each in manifest.outputs}
    if set(inputs) != set(manifest.contract.inputs) or set(expected) != names or len(expected["label"]) < 1:
        raise StorageError(f"{root}/{GOLDEN} has other inputs or outputs than the manifest; {ADVICE}")
    try:
        found = {name: np.asarray(values) for name, values in backend(inputs).items()}
    except Exception as problem:  # an untrusted graph may fail in any way
        raise StorageError(f"{root}: the graph fails on the golden inputs ({str(problem)[:200]}); {ADVICE}") from None
    try:
        compare_answers(expected, found, manifest.calibration, f"{root}: the graph")
    except RunError as problem:
        raise StorageError(f"{problem}, for the golden inputs of the bundle; {ADVICE}") from None
