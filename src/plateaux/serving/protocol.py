"""Open Inference Protocol v2: requests and responses of `/v2/models/{name}/infer`, as JSON or with binary tensors.

A binary tensor follows the JSON of a body, whose length is in the header `Inference-Header-Content-Length`. The inputs
of a model are its arrays by name. An image model also takes encoded image files as `image` (BYTES), and a text model
takes its texts by name (BYTES).
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plateaux.core.errors import DataError
from plateaux.prediction.contract import InputContract, allowed_range
from plateaux.prediction.inputs import PreparedInputs, prepare
from plateaux.prediction.predictions import BY_CLASS, RAW, Predictions
from plateaux.prediction.predictions import DTYPES as ARRAYS
from plateaux.prediction.stage_backend import QUERIED
from plateaux.serving.limits import Reserve, TooLargeError
from plateaux.serving.pixels import count_pixels
from plateaux.serving.settings import ServeSettings

HEADER_LENGTH = "inference-header-content-length"
IMAGE = "image"  # the name of the input that takes encoded image files
DTYPES = {
    "BOOL": np.bool_, "UINT8": np.uint8, "UINT16": np.uint16, "UINT32": np.uint32, "UINT64": np.uint64,
    "INT8": np.int8, "INT16": np.int16, "INT32": np.int32, "INT64": np.int64,
    "FP16": np.float16, "FP32": np.float32, "FP64": np.float64,
}  # fmt: skip
JSON_KINDS = {"B": "b", "U": "iu", "I": "iu", "F": "fiu"}  # of NumPy that JSON data may have, by the first letter
MAX_DIMS, MAX_SIZE = 8, 1 << 31
NUMBER, TEXT = 32, 1 << 16  # bytes of JSON: a number with spaces around it, and a text
PARSED = 64  # bytes of an object of Python, and of its place in a list
OUTPUTS = (
    "label", "label_name", "probability", "probabilities", "entropy", "mutual_information", "ood_score", "is_ood",
    "prediction_set", "abstain", QUERIED, *RAW,
)  # fmt: skip
KINDS = {np.int64: "INT64", np.bool_: "BOOL", np.float64: "FP32"}
OUTPUT_DTYPES = {name: "BYTES" if name == "label_name" else KINDS[ARRAYS[name]] for name in OUTPUTS}
Tensors = Mapping[str, NDArray[Any] | list[bytes]]


@dataclass(frozen=True, slots=True)
class InferRequest:
    """A parsed request."""

    tensors: Tensors
    request_id: str | None
    outputs: tuple[str, ...]  # names in the order of the response
    binary: frozenset[str]  # outputs that are returned as binary tensors

    @property
    def is_encoded(self) -> bool:
        """Whether images must be decoded or texts tokenized, which takes long."""
        return any(isinstance(values, list) for values in self.tensors.values())


def model_metadata(name: str, contract: InputContract, outputs: Sequence[str]) -> dict[str, Any]:
    """Return the description of the model that clients read."""
    inputs: list[dict[str, Any]] = []
    for key, summary in contract.inputs.items():
        parameters: dict[str, Any] = dict(zip(("minimum", "maximum"), allowed_range(summary) or (), strict=False))
        datatype = "INT64" if summary.dtype.startswith("int") else "FP32"
        inputs.append({"name": key, "datatype": datatype, "shape": [-1, *summary.shape], "parameters": parameters})
    if contract.is_image:
        inputs.append({"name": IMAGE, "datatype": "BYTES", "shape": [-1]})
    if contract.preprocessing.tokenizer is not None:
        inputs += [{"name": n, "datatype": "BYTES", "shape": [-1]} for n in contract.preprocessing.tokenizer.texts]
    shown = [
        {"name": key, "datatype": OUTPUT_DTYPES[key], "shape": [-1, contract.classes] if key in BY_CLASS else [-1]}
        for key in outputs
    ]
    known = {"labels": contract.labels, "columns": contract.preprocessing.columns}
    parameters = {key: list(names) for key, names in known.items() if names}
    tree = {"name": name, "versions": ["1"], "platform": "plateaux_onnx", "parameters": parameters}
    return {**tree, "inputs": inputs, "outputs": shown}


def max_json_bytes(contract: InputContract, settings: ServeSettings) -> int:
    """Return how many bytes of JSON the largest request of this model has."""
    shapes = [summary.shape for summary in contract.inputs.values()]
    row = NUMBER * sum(math.prod(shape) + math.prod(shape[:-1]) + MAX_DIMS for shape in shapes)
    row += sum(map(len, map(json.dumps, contract.preprocessing.columns)))
    if contract.preprocessing.tokenizer is not None:
        row += TEXT * len(contract.preprocessing.tokenizer.texts)
    return min(settings.max_bytes, 4096 + settings.max_rows * row)


def split_body(body: bytes, header_length: int | None, max_json: int) -> tuple[bytes, memoryview]:
    """Return the JSON of a body, and what follows it."""
    length = len(body) if header_length is None else header_length
    if length > len(body):
        raise DataError(f"The length of the JSON part is {length}. Expected: at most {len(body)}, all bytes")
    if length > max_json:
        raise TooLargeError(f"The JSON part has {length:,} bytes. Expected: at most {max_json:,}")
    return body[:length], memoryview(body)[length:]


def parse_request(
    content: bytes, rest: memoryview, allowed: Sequence[str], max_rows: int, reserve: Reserve
) -> InferRequest:
    """Parse a body in two parts. Every mistake is a DataError with one sentence."""
    tree = parse_json_object(content, reserve)
    listed = tree.get("inputs")
    if not isinstance(listed, list) or not listed or not all(isinstance(item, dict) for item in listed):
        raise DataError("The request has no inputs. Expected: a list of objects with name, shape, datatype and data")
    tensors: dict[str, NDArray[Any] | list[bytes]] = {}
    for item in listed:
        name = item.get("name")
        if not isinstance(name, str) or name in tensors:
            raise DataError("An input has no name, or a name that occurs twice")
        tensors[name], rest = _read_tensor(item, rest, max_rows)
    if rest:
        raise DataError(f"{len(rest)} bytes follow the last tensor")
    outputs, binary = _read_outputs(tree, allowed)
    request_id = tree.get("id")
    return InferRequest(tensors, request_id if isinstance(request_id, str) else None, outputs, binary)


def parse_json_object(content: bytes, reserve: Reserve) -> dict[str, Any]:
    """Return a JSON object from a body. `[[],[],...]` needs twenty times the bytes of its text."""
    reserve(PARSED * sum(map(content.count, (b",", b"[", b"{", b":"))))
    try:
        tree = json.loads(content)
    except (ValueError, RecursionError):
        raise DataError("The body is not valid JSON") from None
    if not isinstance(tree, dict):
        raise DataError("The body is not a JSON object")
    return tree


def check_rows(rows: int, max_rows: int) -> None:
    """Raise a DataError for a request with too many rows."""
    if rows > max_rows:
        raise DataError(f"The request has {rows} rows. Expected: at most {max_rows}")


def _read_tensor(
    item: Mapping[str, Any], rest: memoryview, max_rows: int
) -> tuple[NDArray[Any] | list[bytes], memoryview]:
    """Return a tensor, and the bytes that follow it."""
    name, shape, datatype = item["name"], item.get("shape"), item.get("datatype")
    if not isinstance(shape, list) or not 1 <= len(shape) <= MAX_DIMS or not all(type(n) is int for n in shape):
        raise DataError(f"The shape of {name[:100]!r} is not a list of 1 to {MAX_DIMS} integers")
    if min(shape) < 1 or max(shape) >= MAX_SIZE or shape[0] > max_rows:
        raise DataError(f"The shape of {name[:100]!r} is {shape}. Expected: 1 to {max_rows} rows")
    if not isinstance(datatype, str) or datatype not in (*DTYPES, "BYTES"):
        raise DataError(
            f"The datatype of {name[:100]!r} is {str(datatype)[:40]!r}. Expected: BYTES, {', '.join(DTYPES)}"
        )
    parameters = item.get("parameters")
    size = parameters.get("binary_data_size") if isinstance(parameters, dict) else None
    if size is not None:
        if type(size) is not int or not 0 <= size <= len(rest):
            raise DataError(
                f"The binary data of {name[:100]!r} have {size} bytes, but {len(rest)} follow the JSON part"
            )
        content, rest = rest[:size], rest[size:]
        return _from_bytes(name, content, shape, datatype), rest
    return _from_json(name, item.get("data"), shape, datatype), rest


def _from_bytes(name: str, content: memoryview, shape: list[int], datatype: Any) -> NDArray[Any] | list[bytes]:
    if datatype == "BYTES":
        return _split_bytes(name, content, shape)
    values = np.frombuffer(content, dtype=np.uint8)
    expected = math.prod(shape) * np.dtype(DTYPES[datatype]).itemsize
    if len(values) != expected:
        raise DataError(f"The binary data of {name[:100]!r} have {len(values)} bytes. Expected: {expected} for {shape}")
    return values.view(DTYPES[datatype]).reshape(shape)


def _split_bytes(name: str, content: memoryview, shape: list[int]) -> list[bytes]:
    """Return the elements of a BYTES tensor; each follows its length in four bytes."""
    items, position = list[bytes](), 0
    while position < len(content):
        begin = position + 4
        position = begin + int.from_bytes(content[position:begin], "little")
        if max(begin, position) > len(content):
            raise DataError(f"The binary data of {name[:100]!r} end within an element")
        items.append(bytes(content[begin:position]))
    if len(items) != math.prod(shape):
        raise DataError(f"{name[:100]!r} has {len(items)} elements, which do not form the shape {shape}")
    return items


def _from_json(name: str, data: Any, shape: list[int], datatype: Any) -> NDArray[Any] | list[bytes]:
    if not isinstance(data, list):
        raise DataError(f"{name[:100]!r} has no data. Expected: a list, or binary data")
    if datatype == "BYTES":
        return _encode_texts(name, data, shape)
    try:
        values: NDArray[Any] = np.array(data)
    except ValueError:
        values = np.array(None)  # rows of different lengths
    if values.dtype.kind not in JSON_KINDS[datatype[0]] or list(values.shape) not in (shape, [math.prod(shape)]):
        raise DataError(
            f"The data of {name[:100]!r} are not {datatype} of shape {shape}, nor a flat list of as many numbers"
        )
    limits = np.iinfo(DTYPES[datatype]) if datatype[0] in "UI" else None
    if limits is not None and (values.min() < limits.min or values.max() > limits.max):
        raise DataError(f"The data of {name[:100]!r} are not {datatype}, from {limits.min} to {limits.max}")
    with np.errstate(over="ignore"):  # infinity is refused later
        return values.astype(DTYPES[datatype]).reshape(shape)


def _encode_texts(name: str, data: list[Any], shape: list[int]) -> list[bytes]:
    is_nested = all(isinstance(row, list) for row in data)
    texts = [text for row in data for text in row] if is_nested else data
    is_shape = all([len(data), len(row)] == shape for row in data) if is_nested else len(texts) == math.prod(shape)
    if not is_shape or not all(isinstance(text, str) for text in texts):
        raise DataError(f"{name[:100]!r} is BYTES. Expected: text of shape {shape}, or a flat list of as many")
    try:
        return [text.encode() for text in texts]
    except UnicodeEncodeError:
        raise DataError(f"A text of {name[:100]!r} is half of a surrogate pair") from None


def prepare_images(
    files: Sequence[bytes], contract: InputContract, max_pixels: int, reserve: Reserve
) -> PreparedInputs:
    """Return image files as inputs of the model."""
    reserve(4 * count_pixels(files, max_pixels, contract.preprocessing.resize))
    _reserve_rows(len(files), contract, reserve)
    return prepare(list(files), contract)


def prepare_json(content: bytes, contract: InputContract, max_rows: int, reserve: Reserve) -> PreparedInputs:
    """Return a JSON body as inputs of the model: `{"inputs": ...}`, or named inputs."""
    tree = parse_json_object(content, reserve)
    value = tree["inputs"] if set(tree) == {"inputs"} else tree
    is_text = contract.preprocessing.tokenizer is not None
    for rows in value.values() if is_text and isinstance(value, dict) else [value]:
        if isinstance(rows, list) and rows and (is_text or not isinstance(rows[0], int | float | list)):
            check_rows(len(rows), max_rows)
            _reserve_rows(len(rows), contract, reserve)
    return prepare(value, contract, paths=False)


def _reserve_rows(rows: int, contract: InputContract, reserve: Reserve) -> None:
    reserve(8 * rows * sum(math.prod(summary.shape) for summary in contract.inputs.values()))


def prepare_tensors(tensors: Tensors, contract: InputContract, max_pixels: int, reserve: Reserve) -> PreparedInputs:
    """Return the tensors of a request as inputs of the model."""
    if set(tensors) == {IMAGE} and contract.is_image and IMAGE not in contract.inputs:
        images = tensors[IMAGE]
        if not isinstance(images, list):
            raise DataError(f"The input {IMAGE!r} takes encoded image files (BYTES)")
        return prepare_images(images, contract, max_pixels, reserve)
    _reserve_rows(max(map(len, tensors.values())), contract, reserve)
    named: dict[str, Any] = {}
    for name, values in tensors.items():
        try:
            named[name] = [text.decode() for text in values] if isinstance(values, list) else values
        except UnicodeDecodeError:
            raise DataError(f"A text of {name[:100]!r} is not UTF-8") from None
    tokenizer = contract.preprocessing.tokenizer
    is_text = tokenizer is not None and set(named) == set(tokenizer.texts)
    if not is_text and any(isinstance(values, list) for values in named.values()):
        raise DataError(f"An input is BYTES. Expected: {contract.describe()}")
    return prepare(named, contract)


def _read_outputs(tree: Mapping[str, Any], allowed: Sequence[str]) -> tuple[tuple[str, ...], frozenset[str]]:
    parameters = tree.get("parameters")
    everything = isinstance(parameters, dict) and parameters.get("binary_data_output") is True
    listed = tree.get("outputs")
    if listed is None:
        return tuple(allowed), frozenset(allowed if everything else ())
    if not isinstance(listed, list) or not all(isinstance(item, dict) for item in listed):
        raise DataError("The outputs are not a list of objects with a name")
    names = [item.get("name") for item in listed]
    unknown = [name for name in names if name not in allowed]
    if unknown or len(set(names)) < len(names):
        raise DataError(f"The outputs are {str(names)[:200]}. Expected: distinct names of {', '.join(allowed)}")
    binary = set()
    for item in listed:
        chosen = item.get("parameters")
        is_binary = chosen.get("binary_data", everything) if isinstance(chosen, dict) else everything
        if is_binary is True:
            binary.add(item["name"])
    return tuple(str(name) for name in names), frozenset(binary)


def output_names(predictions_outputs: Sequence[str]) -> tuple[str, ...]:
    """Return the outputs of a model in the order of its metadata: those that are calibrated, and label names."""
    return tuple(name for name in OUTPUT_DTYPES if name == "label_name" or name in predictions_outputs)


def encode_response(found: Predictions, request: InferRequest, name: str, request_id: str) -> tuple[bytes, int | None]:
    """Return a body, and the length of its JSON part if tensors follow it."""
    arrays = found.to_arrays()
    outputs, blobs = [], []
    for key in request.outputs:
        datatype, is_binary = OUTPUT_DTYPES[key], key in request.binary
        if key == "label_name":
            texts = found.label_name
            shape, data = [len(texts)], texts
            blob = b"".join(struct.pack("<I", len(text)) + text for text in map(str.encode, texts))
        else:
            values: NDArray[Any] = arrays[key].astype(DTYPES[datatype])
            shape = list(values.shape)
            blob, data = (values.tobytes(), []) if is_binary else (b"", values.ravel().tolist())
        item: dict[str, Any] = {"name": key, "datatype": datatype, "shape": shape}
        if is_binary:
            item["parameters"] = {"binary_data_size": len(blob)}
            blobs.append(blob)
        else:
            item["data"] = data
        outputs.append(item)
    tree = {"model_name": name, "model_version": "1", "id": request.request_id or request_id, "outputs": outputs}
    header = json.dumps(tree).encode()
    return header + b"".join(blobs), len(header) if request.binary else None
