"""Speed of exported graphs: five resnet20, and 200 heads over one backbone; CPU time on one thread, alternating.

The eager loop is the same graph as a module of torch: normalization, members, and all answers. The quick form uses
small networks and judges nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from _common import Results, Side, at_least, at_most, budget, interleaved, parse_flags, ratio
from torch import nn

from plateaux.deploy.export import export_program, to_onnx
from plateaux.deploy.graph import AnswerGraph, SharedBackbone
from plateaux.deploy.onnx_backend import OnnxBackend
from plateaux.ensembles.answers import AnswerSettings
from plateaux.ensembles.conformal import Conformal
from plateaux.ensembles.ensemble import Ensemble
from plateaux.ensembles.temperature import Temperatures
from plateaux.models.architectures.resnet import resnet
from plateaux.models.backbone import Backbone, BackboneWithHead, build_head

PARTS = ("members", "heads")
SHAPE = (3, 32, 32)
BATCHES = (1, 64)
Call = Callable[[Mapping[str, Any]], Any]


def settings(members: int) -> AnswerSettings:
    """Return settings with every answer."""
    temperatures = Temperatures("pool then calibrate", members, (1.2,))
    return AnswerSettings("pds", temperatures, Conformal("lac", 0.1, 0.9, 1000), 0.3)


def network(quick: bool) -> nn.Module:
    return resnet(depth=8, shape=SHAPE, classes=10, width=4) if quick else resnet(depth=20, shape=SHAPE, classes=10)


def images(count: int) -> dict[str, np.ndarray[Any, Any]]:
    return {"x": np.random.default_rng(0).random((count, *SHAPE), dtype=np.float32)}


def eager(graph: AnswerGraph) -> Call:
    @torch.no_grad()
    def call(arrays: Mapping[str, Any]) -> Any:
        return [values.numpy() for values in graph(torch.from_numpy(arrays["x"]))]

    return call


def sides(calls: Mapping[str, Call], batch: int, repeats: int) -> dict[str, Side]:
    """Return sides that call each backend `repeats` times."""
    arrays = images(batch)

    def side(call: Call) -> Side:
        return lambda _: [call(arrays) for _ in range(repeats)]

    return {name: side(call) for name, call in calls.items()}


def measure(results: Results, calls: Mapping[str, Call], batch: int) -> dict[str, list[float]]:
    """Time all backends at one batch size, after a warm-up."""
    repeats = 1 if results.quick else 20 if batch == 1 else 1
    interleaved(sides(calls, batch, 3), 1)
    rounds, within = 3 if results.quick else 15, budget(results.quick, 0.1 if results.quick else 0.4)
    times = interleaved(sides(calls, batch, repeats), rounds, within=within, clock=time.process_time)
    if not results.quiet:
        for name, taken in times.items():
            print(f"{name:24} batch {batch:3} {1e3 * statistics.median(taken) / repeats:8.2f} ms")
    return times


def measure_members(results: Results) -> None:
    """Compare five networks as a loop of torch and with onnxruntime."""
    count = 2 if results.quick else 5
    members, chosen = [network(results.quick) for _ in range(count)], settings(count)
    graph = AnswerGraph(Ensemble(members, mean=(0.5,) * 3, std=(0.2,) * 3), chosen, ["x"])
    program = export_program(graph, images(3))
    names = ["x"], list(chosen.outputs)
    calls: dict[str, Call] = {
        "eager loop": eager(graph),
        "eager loop, again": eager(graph),
        "onnxruntime": OnnxBackend(to_onnx(program, *names), *names, threads=1),
    }
    for batch in BATCHES:
        times = measure(results, calls, batch)
        control = f"eager loop / eager loop, batch {batch}"
        results.add(control, ratio(times["eager loop"], times["eager loop, again"]), is_control=True)
        is_judged = batch == 1
        results.add(
            f"eager loop / onnxruntime, {count} networks, batch {batch}",
            ratio(times["eager loop"], times["onnxruntime"]),
            full=at_least(2.5) if is_judged else None,
            control=control,
        )


def measure_heads(results: Results) -> None:
    """Compare 200 heads over one backbone with the backbone alone, both with onnxruntime."""
    count = 20 if results.quick else 200
    backbone = Backbone(network(results.quick), "features", shape=SHAPE)
    heads = [
        BackboneWithHead(backbone, build_head("linear", backbone.shape, classes=10, width=1)) for _ in range(count)
    ]
    chosen = settings(count)
    graph = AnswerGraph(Ensemble(heads), chosen, ["x"])
    alone = torch.export.export(
        SharedBackbone(backbone, nn.Identity()).eval(),
        (torch.zeros(3, *SHAPE),),
        dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=1024)},),
    )
    graphs = {
        "heads": OnnxBackend(
            to_onnx(export_program(graph, images(3)), ["x"], chosen.outputs), ["x"], chosen.outputs, threads=1
        ),
        "backbone": OnnxBackend(to_onnx(alone, ["x"], ["features"]), ["x"], ["features"], threads=1),
    }
    calls: dict[str, Call] = {**graphs, "backbone, again": graphs["backbone"], "eager": eager(graph)}
    for batch in BATCHES:
        times = measure(results, calls, batch)
        control = f"backbone / backbone, batch {batch}"
        results.add(control, ratio(times["backbone"], times["backbone, again"]), is_control=True)
        results.add(
            f"{count} heads / backbone alone, onnxruntime, batch {batch}",
            ratio(times["heads"], times["backbone"]),
            full=at_most(1.5),
            control=control,
        )
        results.add(f"eager / onnxruntime, {count} heads, batch {batch}", ratio(times["eager"], times["heads"]))


def main() -> None:
    args = parse_flags(__doc__ or "", PARTS)
    results = Results(args.quick, args.json)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if "members" in args.parts:
        measure_members(results)
    if "heads" in args.parts:
        measure_heads(results)
    results.finish(parts=args.parts, torch=torch.__version__)


if __name__ == "__main__":
    main()
