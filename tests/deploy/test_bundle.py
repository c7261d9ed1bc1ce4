"""A bundle is untrusted data: changed, missing, foreign, and linked files are refused; nothing in it is executed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from typer.testing import CliRunner

import plateaux
from plateaux.cli.main import app
from plateaux.core.errors import RecipeError, RunError, StorageError
from plateaux.deploy.bundle import Bundle
from plateaux.deploy.manifest import MAX_BYTES
from plateaux.deploy.onnx_backend import check_graph
from plateaux.storage.digests import with_json_digest

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.xdist_group("bundle")  # one worker makes the bundle once
FILES = (
    *("manifest.json", "README.md", "model.onnx", "golden.safetensors"),
    *("members/0.safetensors", "members/1.safetensors"),
)


@pytest.fixture
def bundle(exported: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported, tmp_path / "bundle"))


def sign(bundle: Path, change: Callable[[dict[str, Any]], object] | None = None) -> None:
    """Write the manifest again for changed files, as an attacker would."""
    file = bundle / "manifest.json"
    tree = json.loads(file.read_text())
    for name in tree["files"]:
        if (bundle / name).is_file():
            content = (bundle / name).read_bytes()
            tree["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    if change is not None:
        change(tree)
    file.write_text(json.dumps(with_json_digest(tree), indent=2) + "\n")


def test_a_bundle_has_the_documented_files_and_opening_changes_none(bundle: Path) -> None:
    found = {path.relative_to(bundle).as_posix() for path in bundle.rglob("*") if path.is_file()}
    assert found == set(FILES)
    before = {name: (bundle / name).read_bytes() for name in FILES}
    plateaux.load_predictor(bundle)
    sign(bundle)
    assert {name: (bundle / name).read_bytes() for name in FILES} == before  # `sign` writes what `export` wrote
    recorded = json.loads(before["manifest.json"])["files"]
    assert set(recorded) == {*FILES} - {"manifest.json"}
    for name, record in recorded.items():
        assert record == {"bytes": len(before[name]), "sha256": hashlib.sha256(before[name]).hexdigest()}


@pytest.mark.parametrize("name", FILES)
def test_a_changed_byte_anywhere_is_refused_and_the_file_is_named(bundle: Path, name: str) -> None:
    file = bundle / name
    content = file.read_bytes()
    generator = np.random.default_rng(len(content))
    positions = [0, len(content) - 1, *generator.integers(0, len(content), 30)]
    if name == "manifest.json":
        positions += list(range(0, len(content), 7))
    for position in positions:
        changed = bytearray(content)
        changed[position] ^= int(generator.integers(1, 256))
        file.write_bytes(changed)
        with pytest.raises(StorageError, match=name.replace(".", r"\.")):
            Bundle.open(bundle)
    for other in (content[:-1], content + b"\0", b""):
        file.write_bytes(other)
        with pytest.raises(RunError, match=name.replace(".", r"\.")):
            Bundle.open(bundle)
    file.unlink()
    with pytest.raises(RunError, match=name.replace(".", r"\.")):
        plateaux.load_predictor(bundle)


@pytest.mark.parametrize(
    "name", ["extra.txt", ".hidden", "members/2.safetensors", "members/evil.py", "readme.md", "a/b"]
)
def test_an_additional_file_is_refused_and_named(bundle: Path, name: str) -> None:
    (bundle / name).parent.mkdir(exist_ok=True)
    (bundle / name).write_text("x")
    with pytest.raises(StorageError, match=rf"{name} does not belong to the bundle"):
        Bundle.open(bundle)


@pytest.mark.parametrize("name", [*FILES, "members", "extra"])
def test_a_link_is_refused(bundle: Path, tmp_path: Path, name: str) -> None:
    path, target = bundle / name, tmp_path / "target"
    path.rename(target) if path.exists() else target.write_text("x")
    path.symlink_to(target)
    with pytest.raises(StorageError, match="symbolic link"):
        plateaux.load_predictor(bundle)


ESCAPING = (
    *("../target", "/etc/passwd", "members/../../target", "members/../model.onnx", "./model.onnx", "a\0b", ""),
    *("members//0.safetensors", "members/00.safetensors", "members/0.pt", "evil.py", "model.pkl", "model.onnx\n"),
    *("MODEL.ONNX", "stages/0.onnx"),
)


@pytest.mark.parametrize("name", ESCAPING)
def test_a_name_outside_of_the_fixed_set_is_refused(bundle: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "target").write_bytes(b"x")
    record = {"bytes": 1, "sha256": hashlib.sha256(b"x").hexdigest()}
    sign(bundle, lambda tree: tree["files"].update({name: record}))
    with pytest.raises(StorageError, match="which no bundle contains"):
        Bundle.open(bundle)


CHANGES: dict[str, Any] = {
    "format": (lambda t: t.update(format=1), "has format '1'"),
    "a list": (lambda t: t.update(files=[]), "files is not a JSON object"),
    "no graph": (lambda t: t["files"].pop("model.onnx"), "does not name model.onnx"),
    "unnamed": (lambda t: t["files"].pop("README.md"), "does not belong to the bundle"),
    "sha": (lambda t: t["files"]["model.onnx"].update(sha256="0" * 64), "SHA-256"),
    "short sha": (lambda t: t["files"]["model.onnx"].update(sha256="00"), "sha256"),
    "size": (lambda t: t["files"]["model.onnx"].update(bytes=-1), "bytes"),
    "huge size": (lambda t: t["files"]["model.onnx"].update(bytes=1 << 60), "bytes"),
    "outputs": (lambda t: t["outputs"].pop(), "not those of its manifest"),
    "no label": (lambda t: t["outputs"].pop(0), r"outputs \['label'\]"),
    "other output": (lambda t: t["outputs"][0].update(name="code"), "'code'"),
    "classes": (lambda t: t["contract"].update(classes=11), "outputs"),
    "a billion classes": (lambda t: t["contract"].update(classes=10**9), "has 1,000,000,000 classes"),
    "contract": (lambda t: t.pop("contract"), "contract"),
    "inputs": (lambda t: t["contract"]["inputs"].update(y=t["contract"]["inputs"]["x"]), "not those of its"),
    "task": (lambda t: t.update(task="shell"), "task"),
    "nan": (lambda t: t["calibration"]["temperatures"].__setitem__(0, float("nan")), "temperatures"),
    "text": (lambda t: t.update(license=["x"]), "license"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_wrong_manifest_is_refused_with_the_field(bundle: Path, name: str) -> None:
    change, message = CHANGES[name]
    sign(bundle, change)
    with pytest.raises(StorageError, match=message):
        plateaux.load_predictor(bundle)


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"null", b"{", b"[" * 100_000, b'{"format": 1}', b"\xff\xfe", b"7" * 5000]
)
def test_an_invalid_manifest_is_refused(bundle: Path, content: bytes) -> None:
    (bundle / "manifest.json").write_bytes(content)
    with pytest.raises(StorageError, match=r"manifest\.json"):
        Bundle.open(bundle)


def test_a_manifest_of_64_gb_is_refused_before_it_is_read(bundle: Path) -> None:
    with (bundle / "manifest.json").open("r+b") as file:
        file.truncate(1 << 36)  # sparse
    with pytest.raises(StorageError, match=f"more than {MAX_BYTES:,} bytes"):
        Bundle.open(bundle)


def test_a_file_larger_than_in_the_manifest_is_refused(bundle: Path) -> None:
    before = (bundle / "golden.safetensors").read_bytes()
    with (bundle / "golden.safetensors").open("r+b") as file:
        file.truncate(1 << 36)
    with pytest.raises(StorageError, match=r"golden\.safetensors is damaged"):
        Bundle.open(bundle)
    (bundle / "golden.safetensors").write_bytes(before)
    Bundle.open(bundle)


def test_a_manifest_with_other_white_space_or_duplicate_keys_is_refused(bundle: Path) -> None:
    file = bundle / "manifest.json"
    text = file.read_text()
    for other in (text + "\n", text.replace("\n", " ", 1), text.replace('"task"', '"task": "x",\n  "task"', 1)):
        file.write_text(other)
        with pytest.raises(StorageError, match="not as it was written"):
            Bundle.open(bundle)


def change_golden(bundle: Path, **tensors: Any) -> None:
    file = bundle / "golden.safetensors"
    golden = safetensors.numpy.load(file.read_bytes())
    golden |= {name.replace("__", "."): values for name, values in tensors.items()}
    file.write_bytes(safetensors.numpy.save({name: values for name, values in golden.items() if values is not None}))
    sign(bundle)


def test_golden_outputs_are_checked_at_load(bundle: Path) -> None:
    golden = safetensors.numpy.load((bundle / "golden.safetensors").read_bytes())
    assert len(golden["output.label"]) == 4
    change_golden(bundle, output__probabilities=golden["output.probabilities"] + np.float32(3e-5))
    with pytest.raises(StorageError, match=r"the expected probabilities by 3e-05.* golden inputs"):
        plateaux.load_predictor(bundle)
    change_golden(
        bundle, output__probabilities=golden["output.probabilities"], output__label=golden["output.label"] + 1
    )
    with pytest.raises(StorageError, match="expected label of sample 0"):
        plateaux.load_predictor(bundle)
    change_golden(bundle, output__label=None)
    with pytest.raises(StorageError, match="other inputs or outputs than the manifest"):
        plateaux.load_predictor(bundle)
    change_golden(bundle, output__label=golden["output.label"], input__x=golden["input.x"][:, :, :3])
    with pytest.raises(StorageError, match="the graph fails on the golden inputs"):
        plateaux.load_predictor(bundle)
    (bundle / "golden.safetensors").write_bytes(b"x" * 100)
    sign(bundle)
    with pytest.raises(StorageError, match=r"golden\.safetensors is damaged"):
        plateaux.load_predictor(bundle)


def tiny_graph(*, domain: str = "", location: str | None = None, nested: bool = False) -> Any:
    helper = onnx.helper
    weight = helper.make_tensor("w", onnx.TensorProto.FLOAT, [1], [1.0])
    if location is not None:
        weight = onnx.TensorProto(name="w", data_type=onnx.TensorProto.FLOAT, dims=[1])
        weight.data_location = onnx.TensorProto.EXTERNAL
        weight.external_data.add(key="location", value=location)
    x, y = (helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["N"]) for name in "xy")
    nodes = [helper.make_node("Mul", ["x", "w"], ["y"], domain=domain)]
    if nested:
        inner = helper.make_graph([helper.make_node("Identity", ["w"], ["z"])], "g", [], [y], [weight])
        nodes.append(helper.make_node("If", ["c"], ["q"], then_branch=inner, else_branch=inner))
        weight = helper.make_tensor("w", onnx.TensorProto.FLOAT, [1], [1.0])
    opsets = [helper.make_opsetid("", 18), *([helper.make_opsetid(domain, 1)] if domain else [])]
    return helper.make_model(helper.make_graph(nodes, "g", [x], [y], [weight]), opset_imports=opsets, ir_version=10)


def test_graphs_with_external_data_or_custom_operators_are_refused(bundle: Path) -> None:
    check_graph(tiny_graph().SerializeToString(), "it")
    for model, message in (
        (tiny_graph(location="../../secret"), "external data"),
        (tiny_graph(location="golden.safetensors", nested=True), "external data"),
        (tiny_graph(domain="com.evil"), r"operators of \['com\.evil'\]"),
        (tiny_graph(domain="com.microsoft"), r"com\.microsoft"),
    ):
        with pytest.raises(StorageError, match=message):
            check_graph(model.SerializeToString(), "it")
    sparse = tiny_graph()
    attribute = sparse.graph.node.add(op_type="Constant", output=["s"]).attribute.add(name="sparse_value")
    attribute.type = onnx.AttributeProto.SPARSE_TENSOR
    attribute.sparse_tensor.values.CopyFrom(tiny_graph(location="../../secret").graph.initializer[0])
    with pytest.raises(StorageError, match="external data"):
        check_graph(sparse.SerializeToString(), "it")
    function = tiny_graph()
    function.functions.add(name="f", domain="")
    with pytest.raises(StorageError, match="functions"):
        check_graph(function.SerializeToString(), "it")
    for content, message in (
        (tiny_graph().SerializeToString(), "not those of its manifest"),
        (b"no graph at all", "not an ONNX file"),
        (b"", "no graph that onnxruntime can run"),
    ):
        (bundle / "model.onnx").write_bytes(content)
        sign(bundle)
        with pytest.raises(StorageError, match=rf"model\.onnx .*{message}"):
            plateaux.load_predictor(bundle)


def test_a_graph_with_a_loop_or_a_huge_constant_is_refused() -> None:
    helper, model = onnx.helper, tiny_graph()
    for operator in ("Loop", "If", "Scan", "RandomNormal", "SequenceEmpty", "NotAnOperator"):
        model = tiny_graph()
        model.graph.node.add(op_type=operator, output=["q"])
        with pytest.raises(StorageError, match=rf"uses the operators \['{operator}'\]"):
            check_graph(model.SerializeToString(), "it")
    shape = helper.make_tensor("shape", onnx.TensorProto.INT64, [2], [1 << 15, 1 << 14])
    for is_node in (False, True):
        model = tiny_graph()
        if is_node:
            model.graph.node.append(helper.make_node("Constant", [], ["shape"], value=shape))
        else:
            model.graph.initializer.append(shape)
        model.graph.node.append(helper.make_node("ConstantOfShape", ["shape"], ["q"]))
        with pytest.raises(StorageError, match="more than 67,108,864 numbers"):
            check_graph(model.SerializeToString(), "it")


def test_a_pinned_bundle_is_opened_only_with_its_digest(bundle: Path, tmp_path: Path) -> None:
    digest = hashlib.sha256((bundle / "manifest.json").read_bytes()).hexdigest()
    assert Bundle.open(bundle, sha256=digest).sha256 == digest
    words = ["predict", str(bundle), "x.npy", "-o", str(tmp_path / "out.csv"), "--sha256"]
    opened = Bundle.open(bundle)
    sign(bundle, lambda tree: tree["contract"]["labels"].reverse())  # every digest in it is right
    assert Bundle.open(bundle).sha256 != digest
    with pytest.raises(StorageError, match=f"Expected: {digest}"):
        Bundle.open(bundle, sha256=digest)
    result = CliRunner().invoke(app, [*words, digest])
    assert (result.exit_code, "is another bundle" in result.stderr) == (4, True)
    np.save(tmp_path / "x.npy", np.zeros((2, 1, 8, 8), dtype=np.float32))
    with pytest.raises(StorageError, match="is another bundle"):
        plateaux.predict(opened, tmp_path / "x.npy", tmp_path / "out.csv")
    with pytest.raises(StorageError, match="is another bundle"):
        plateaux.pull(bundle, tmp_path / "copy", sha256=digest)
    assert not (tmp_path / "copy" / "manifest.json").exists()


AUDIT = """
import json, os, sys
sys.path.insert(0, sys.argv[2])
from auditing import Auditor
import numpy, onnx, onnxruntime, safetensors.numpy, plateaux.deploy.load_predictor
opened = []
auditor = Auditor([])
def hook(event, args):
    auditor.hook(event, args)
    if event == "open" and isinstance(args[0], str) and not args[0].endswith((".py", ".pyc")):
        opened.append([args[0], args[2]])
sys.addaudithook(hook)
try:
    predictor = plateaux.load_predictor(sys.argv[1], threads=1)
    predictor(numpy.zeros((3, 1, 8, 8), dtype=numpy.uint8))
    ended = "answered"
except plateaux.errors.PlateauxError as error:
    ended = type(error).__name__
found = {name: sorted(events) for name, events in auditor.found.items()}
writes = [path for path, flags in opened if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND)]
print(json.dumps({"ended": ended, "opened": sorted({path for path, _ in opened}), "written": writes, **found}))
"""


@pytest.mark.parametrize("attack", ["none", "changed byte", "foreign file", "external data"])
def test_opening_a_bundle_executes_nothing_and_writes_nothing(bundle: Path, tmp_path: Path, attack: str) -> None:
    marker = f"import os\nos.mkdir({str(tmp_path / 'marker')!r})\n"
    if attack == "changed byte":
        (bundle / "model.onnx").write_bytes(b"x" + (bundle / "model.onnx").read_bytes()[1:])
    elif attack == "foreign file":
        (bundle / "plateaux.py").write_text(marker)
    elif attack == "external data":
        (bundle / "model.onnx").write_bytes(tiny_graph(location="golden.safetensors").SerializeToString())
        sign(bundle)
    before = {path: path.read_bytes() for path in bundle.rglob("*") if path.is_file()}
    env = {**os.environ, "PYTHONPATH": str(Path(plateaux.__file__).parents[1]), "PYTHONDONTWRITEBYTECODE": "1"}
    env = {name: value for name, value in env.items() if not name.startswith("COVERAGE_")}
    words = [sys.executable, "-P", "-c", AUDIT, str(bundle), str(Path(__file__).parents[1])]
    ended = subprocess.run(words, cwd=bundle, env=env, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    audit = json.loads(ended.stdout.splitlines()[-1])
    assert audit["ended"] == ("answered" if attack == "none" else "StorageError")
    assert [audit[name] for name in ("written", "writes", "code", "processes", "network")] == [[]] * 5
    inside = [path for path in audit["opened"] if not path.startswith(("/proc/", "/sys/", sys.prefix, sys.base_prefix))]
    allowed = {str(bundle), "members", *(Path(name).name for name in FILES)}
    assert {path for path in inside if "dist-info" not in path} <= allowed
    assert {path: path.read_bytes() for path in bundle.rglob("*") if path.is_file()} == before
    assert not (tmp_path / "marker").exists()


def test_threads_share_a_bundle(bundle: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    predictor = plateaux.load_predictor(bundle, threads=1)
    images = np.random.default_rng(0).integers(0, 256, (24, 1, 8, 8), dtype=np.uint8)
    expected = [predictor(image).probabilities for image in images]
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda image: predictor(image).probabilities, images))
    assert all(np.array_equal(one, other) for one, other in zip(found, expected, strict=True))


def test_an_opened_bundle_predicts_inputs_but_has_no_modules_and_no_data(bundle: Path, tmp_path: Path) -> None:
    opened = Bundle.open(bundle)
    x = np.zeros((3, 1, 8, 8), dtype=np.uint8)
    np.save(tmp_path / "x.npy", x)
    predictor = plateaux.load_predictor(opened)
    result = plateaux.predict(opened, tmp_path / "x.npy", tmp_path / "a.npz")
    assert (result.inputs, result.failed) == (3, 0)
    assert np.array_equal(np.load(tmp_path / "a.npz")["probabilities"], predictor(x).probabilities)
    with pytest.raises(RunError, match="The predictor of a bundle has no `ensemble`"):
        predictor.ensemble  # noqa: B018
    with pytest.raises(RecipeError, match="with a bundle, which has no data"):
        plateaux.predict(opened, split="test")


def test_the_command_writes_a_bundle(calibrated_run: Path, tmp_path: Path) -> None:
    words = [
        "export",
        str(calibrated_run),
        "-o",
        str(tmp_path / "b"),
        "--golden",
        "random",
        "--alpha",
        "0.05",
    ]
    result = CliRunner().invoke(app, [*words, "--ood-score", "energy", "--license", "MIT", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["max_difference"]["model.onnx"] < 1e-5
    assert json.loads(result.stdout)["sha256"] == Bundle.open(tmp_path / "b").sha256
    manifest = Bundle.open(tmp_path / "b").manifest
    assert (manifest.ood_score, manifest.license, manifest.golden) == ("energy", "MIT", "random inputs of seed 0")
    assert manifest.calibration is not None
    assert manifest.calibration.sets is not None
    assert manifest.calibration.sets.alpha == 0.05
    result = CliRunner().invoke(app, [*words])
    assert result.exit_code == 4
    assert "is not empty" in result.stderr
    result = CliRunner().invoke(app, ["export", str(tmp_path / "b"), "-o", str(tmp_path / "c")])
    assert result.exit_code == 4
    assert "is not a run folder" in result.stderr
    with pytest.raises(RunError, match=r"is not a bundle: it has no manifest\.json"):
        Bundle.open(calibrated_run)
