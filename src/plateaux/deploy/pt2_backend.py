"""Answers computed by the `.pt2` file of a bundle, which torch may unpickle: it is loaded only if it is trusted."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from plateaux.core.errors import StorageError, UntrustedCodeError, first_line
from plateaux.core.runtime import num_threads
from plateaux.deploy.bundle import Bundle
from plateaux.deploy.manifest import ADVICE, PT2
from plateaux.deploy.predictor import Arrays


class Pt2Backend:
    """An exported program of torch on the CPU."""

    def __init__(
        self, content: bytes, inputs: Sequence[str], outputs: Sequence[str], *, threads: int | None = None
    ) -> None:
        """Load a file. This may execute code that the file contains: pass only content that is trusted."""
        self.module = torch.export.load(io.BytesIO(content)).module()
        self.inputs, self.outputs, self.threads = tuple(inputs), tuple(outputs), threads

    @torch.no_grad()
    def __call__(self, arrays: Arrays) -> dict[str, NDArray[Any]]:
        inputs = [torch.from_numpy(np.ascontiguousarray(arrays[name])) for name in self.inputs]
        with num_threads(self.threads):
            answers = self.module(*inputs)
        return {name: values.numpy() for name, values in zip(self.outputs, answers, strict=True)}


def load_pt2(bundle: Bundle, *, trust: Sequence[str], threads: int | None) -> Pt2Backend:
    """Return the `.pt2` graph of a bundle that the caller trusts."""
    if PT2 not in trust:
        raise UntrustedCodeError(
            f"{bundle.store.root / PT2} may contain code that torch executes when it loads the file. If you trust "
            f'whoever made the bundle, pass trust=["{PT2}"]; otherwise use the ONNX graph, which needs no trust'
        )
    manifest = bundle.manifest
    content = bundle.read(PT2)
    try:
        return Pt2Backend(
            content, list(manifest.contract.inputs), [each.name for each in manifest.outputs], threads=threads
        )
    except Exception as problem:
        raise StorageError(f"{bundle.store.root / PT2} cannot be loaded ({first_line(problem)}); {ADVICE}") from None
