"""Answers computed by onnxruntime. A graph is data: nothing in it is executed as code. Importing this needs no torch.

A graph may come from anyone. It is refused if it reads other files (external data), uses operators outside of those to
which networks are exported (others may need a library, or never end), makes huge constants, or has other inputs and
outputs than its manifest says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plateaux.core.errors import DataError, StorageError, first_line
from plateaux.core.imports import optional_import
from plateaux.prediction.predictor import Arrays

EXTRA = "onnx"
LOG_ERRORS = 3
STANDARD = ("", "ai.onnx")
MAX_ELEMENTS = 1 << 26  # of a tensor whose shape is a constant of the graph
SIZES = {"ConstantOfShape": 0, "Expand": 1, "Tile": 1, "OneHot": 1, "Range": 1}  # which input is a size
# Those of ONNX without loops, functions of text, sequences, optional values, and random numbers.
OPERATORS = """
    Abs Acos Acosh Add AffineGrid And ArgMax ArgMin Asin Asinh Atan Atanh Attention AveragePool BatchNormalization
    BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Cast CastLike Ceil Celu CenterCropPad Clip Col2Im Compress
    Concat Constant ConstantOfShape Conv ConvInteger ConvTranspose Cos Cosh CumSum DFT DepthToSpace DequantizeLinear
    Det Div Dropout DynamicQuantizeLinear Einsum Elu Equal Erf Exp Expand EyeLike Flatten Floor GRU Gather
    GatherElements GatherND Gelu Gemm GlobalAveragePool GlobalLpPool GlobalMaxPool Greater GreaterOrEqual GridSample
    GroupNormalization HardSigmoid HardSwish Hardmax Identity InstanceNormalization IsInf IsNaN LRN LSTM
    LayerNormalization LeakyRelu Less LessOrEqual Log LogSoftmax LpNormalization LpPool MatMul MatMulInteger Max
    MaxPool MaxUnpool Mean MeanVarianceNormalization Min Mish Mod Mul Neg NonZero Not OneHot Or PRelu Pad Pow
    QLinearConv QLinearMatMul QuantizeLinear RMSNormalization RNN Range Reciprocal ReduceL1 ReduceL2 ReduceLogSum
    ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare Relu Reshape Resize
    ReverseSequence RoiAlign RotaryEmbedding Round STFT ScatterElements ScatterND Selu Shape Shrink Sigmoid Sign Sin
    Sinh Size Slice Softmax Softplus Softsign SpaceToDepth Split Sqrt Squeeze Sub Sum Swish Tan Tanh ThresholdedRelu
    Tile TopK Transpose Trilu Unique Unsqueeze Where Xor
"""


class OnnxBackend:
    """A graph as a session of onnxruntime on the CPU. Threads may share it."""

    def __init__(
        self,
        content: bytes,
        inputs: Sequence[str],
        outputs: Sequence[str],
        *,
        threads: int | None = None,
        name: object = "The graph",
    ) -> None:
        check_graph(content, name)
        runtime = optional_import("onnxruntime", extra=EXTRA)
        options = runtime.SessionOptions()
        options.log_severity_level = LOG_ERRORS
        if threads is not None:
            options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        # Otherwise a file that is valid in two formats would be checked as one and run as the other.
        options.add_session_config_entry("session.load_model_format", "ONNX")
        try:
            self.session = runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        except Exception as problem:
            raise StorageError(f"{name} is no graph that onnxruntime can run ({first_line(problem)[:200]})") from None
        self.outputs = list(outputs)
        found = {each.name for each in self.session.get_inputs()}, {each.name for each in self.session.get_outputs()}
        if found != (set(inputs), set(outputs)):
            raise StorageError(f"{name} has the inputs and outputs {found}, not those of its manifest")

    def __call__(self, arrays: Arrays) -> dict[str, NDArray[Any]]:
        feeds = {name: np.ascontiguousarray(values) for name, values in arrays.items()}
        try:
            found = self.session.run(self.outputs, feeds)
        except Exception as problem:
            if type(problem).__name__ != "InvalidArgument":
                raise
            raise DataError(f"The graph cannot compute this input ({first_line(problem)[-200:]})") from None
        return dict(zip(self.outputs, found, strict=True))


def check_graph(content: bytes, name: object) -> None:
    """Raise a `StorageError` for a graph that needs other files, other operators, or huge constants."""
    onnx = optional_import("onnx", extra=EXTRA)
    try:
        model = onnx.load_model_from_string(content)
    except Exception as problem:
        raise StorageError(f"{name} is not an ONNX file ({first_line(problem)[:200]})") from None
    if model.functions or model.training_info:
        raise StorageError(f"{name} contains functions or training steps, which are not allowed in a bundle")
    domains, operators = {each.domain for each in model.opset_import}, set[str]()
    for graph in _graphs(model.graph):
        domains |= {node.domain for node in graph.node}
        operators |= {node.op_type for node in graph.node}
        constants = {each.name: each for each in graph.initializer}
        constants |= {node.output[0]: each.t for node in graph.node for each in node.attribute if each.HasField("t")}
        for node in graph.node:
            size = constants.get((*node.input, "", "")[SIZES[node.op_type]]) if node.op_type in SIZES else None
            if size is not None and np.prod(onnx.numpy_helper.to_array(size), dtype=np.float64) > MAX_ELEMENTS:
                raise StorageError(f"{name} makes a tensor of more than {MAX_ELEMENTS:,} numbers ({node.op_type})")
        attributes = [each for node in graph.node for each in node.attribute]
        tensors = [*graph.initializer, *(tensor for each in attributes for tensor in [each.t, *each.tensors])]
        sparse = [s for each in attributes for s in [each.sparse_tensor, *each.sparse_tensors]]
        for each in (*graph.sparse_initializer, *sparse):
            tensors += [each.values, each.indices]
        if any(tensor.data_location == onnx.TensorProto.EXTERNAL or tensor.external_data for tensor in tensors):
            raise StorageError(f"{name} reads external data from another file, which is not allowed in a bundle")
    if foreign := sorted(domains - set(STANDARD)):
        raise StorageError(f"{name} uses operators of {foreign}; only standard operators of ONNX are allowed")
    if unknown := sorted(operators - set(OPERATORS.split())):
        raise StorageError(f"{name} uses the operators {unknown}. A bundle may not contain loops, branches, or noise")


def _graphs(graph: Any) -> Iterator[Any]:
    """Yield a graph and the graphs inside of its nodes."""
    waiting = [graph]
    while waiting:
        yield (graph := waiting.pop())
        for node in graph.node:
            for attribute in node.attribute:
                waiting += [*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs]
