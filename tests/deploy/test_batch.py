"""Batch prediction: every kind of input, errors as rows, equal bytes after a kill and with several processes."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from digit_runs import SMALL_MLP, train_digits
from PIL import Image

import plateaux
from plateaux.core.errors import DataError, RecipeError, RunError
from plateaux.core.progress import ProgressEvent, WorkDone
from plateaux.core.registry import dataset
from plateaux.data.data_summary import TensorSummary
from plateaux.data.preprocessing import Preprocessing, WordPiece
from plateaux.deploy import batch
from plateaux.deploy.load_predictor import load_predictor
from plateaux.deploy.predict import predict
from plateaux.evaluation.evaluator import Evaluator
from plateaux.evaluation.member_outputs import predict_all
from plateaux.evaluation.splits import eval_split
from plateaux.prediction import split_predictions
from plateaux.prediction.contract import InputContract
from plateaux.prediction.input_files import InputReader, list_inputs
from plateaux.prediction.inputs import prepare
from tests.cli.test_main import call

SMALL = {"part_size": 7}


pytestmark = pytest.mark.xdist_group("batch")  # one worker trains the run once


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = train_digits(tmp_path_factory.mktemp("run"), model=SMALL_MLP)
    plateaux.calibrate(out, target_risk=0.1)
    return out


@pytest.fixture(scope="module")
def images() -> np.ndarray[Any, Any]:
    x, _ = dataset.get("digits")().test.fetch(torch.arange(40))
    assert isinstance(x, torch.Tensor)
    return x.numpy()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, images: np.ndarray[Any, Any]) -> Path:
    root = tmp_path_factory.mktemp("images")
    for number, image in enumerate(images):
        (root / f"{number % 2}").mkdir(exist_ok=True)
        Image.fromarray(image[0], "L").save(root / f"{number % 2}" / f"{number:02d}.png")
    (root / "1" / "notes.txt").write_text("not an image")
    return root


def read_csv(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as text:
        return list(csv.DictReader(text))


def test_a_folder_is_predicted_in_order_with_the_answers_of_the_predictor(
    run: Path, folder: Path, images: np.ndarray[Any, Any], tmp_path: Path
) -> None:
    events: list[ProgressEvent] = []
    result = predict(run, folder, tmp_path / "a.csv", batch=SMALL, progress=events.append)
    assert (result.inputs, result.failed, result.reused) == (40, 0, 0)
    rows = read_csv(tmp_path / "a.csv")
    order = [*range(0, 40, 2), *range(1, 40, 2)]
    assert [row["name"] for row in rows] == [str(folder / f"{n % 2}" / f"{n:02d}.png") for n in order]
    expected = load_predictor(run)(images[order])
    assert [int(row["label"]) for row in rows] == expected.label.tolist()
    assert np.allclose([float(row["probability"]) for row in rows], expected.probability, atol=1e-6)
    assert expected.prediction_set_names is not None
    assert [row["prediction_set"] for row in rows] == ["|".join(names) for names in expected.prediction_set_names]
    assert [row["abstain"] == "True" for row in rows] == list(expected.abstain if expected.abstain is not None else ())
    assert result.abstained == sum(row["abstain"] == "True" for row in rows)
    assert {row["error"] for row in rows} == {""}
    assert [event.done for event in events if isinstance(event, WorkDone)] == [7, 14, 21, 28, 35, 40]
    assert not (tmp_path / "a.csv.parts").exists()


def test_all_output_formats_contain_the_same_answers(run: Path, folder: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "bad.png").write_bytes(b"not an image")
    inputs = [folder, tmp_path / "bad.png"]
    for suffix in ("csv", "jsonl", "npz", "parquet"):
        result = predict(run, inputs, tmp_path / f"a.{suffix}", batch=SMALL)
        assert (result.inputs, result.failed) == (41, 1)
        predict(run, inputs, tmp_path / f"b.{suffix}", batch=SMALL)
        assert (tmp_path / f"a.{suffix}").read_bytes() == (tmp_path / f"b.{suffix}").read_bytes()
        predict(run, inputs, tmp_path / f"raw.{suffix}", batch=SMALL, raw=True)
    raw = [json.loads(line) for line in (tmp_path / "raw.jsonl").read_text().splitlines()]
    of_table, of_arrays = parquet.read_table(tmp_path / "raw.parquet").to_pylist(), np.load(tmp_path / "raw.npz")
    for i in (0, 25, 39):
        assert raw[i]["raw_entropy"] == of_table[i]["raw_entropy"] == of_arrays["raw_entropy"][i]
        assert list(raw[i]["raw_probabilities"].values()) == of_table[i]["raw_probabilities"]
        assert "raw_probabilities" not in read_csv(tmp_path / "raw.csv")[i]
    assert raw[40]["raw_label"] is of_table[40]["raw_probabilities"] is None
    rows = read_csv(tmp_path / "a.csv")
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    arrays = np.load(tmp_path / "a.npz")
    table = parquet.read_table(tmp_path / "a.parquet").to_pylist()
    assert len(rows) == len(lines) == len(arrays["label"]) == len(table) == 41
    for i in (0, 25, 39):
        assert int(rows[i]["label"]) == lines[i]["label"] == arrays["label"][i] == table[i]["label"]
        assert rows[i]["label_name"] == lines[i]["label_name"] == table[i]["label_name"]
        assert float(rows[i]["entropy"]) == lines[i]["entropy"] == arrays["entropy"][i] == table[i]["entropy"]
        assert list(lines[i]["probabilities"].values()) == table[i]["probabilities"]
        assert lines[i]["prediction_set"] == table[i]["prediction_set"]
    for last in (lines[40], table[40]):
        assert last["label"] is None
        assert last["abstain"] is None
        assert "cannot be decoded as an image" in last["error"]
    assert rows[40]["label"] == rows[40]["probability"] == rows[40]["abstain"] == ""
    assert "cannot be decoded" in rows[40]["error"]
    assert arrays["label"][40] == -1
    assert np.isnan(arrays["probability"][40])
    assert arrays["error"][40] != ""
    assert arrays["error"][0] == ""


def test_arrays_and_tables_of_paths_are_the_same_inputs(
    run: Path, folder: Path, images: np.ndarray[Any, Any], tmp_path: Path
) -> None:
    np.save(tmp_path / "x.npy", images)
    np.savez(tmp_path / "x.npz", images=images)
    np.savez(tmp_path / "two.npz", other=images[:1], x=images)
    files = [folder / f"{n % 2}" / f"{n:02d}.png" for n in range(40)]
    lines = [os.path.relpath(file, tmp_path) for file in files]
    (tmp_path / "t.csv").write_text("path,note\n" + "".join(f'{line},"a, b"\n' for line in lines))
    (tmp_path / "t.txt").write_text("\n".join(map(str, files)) + "\n")
    expected = load_predictor(run)(images).label.tolist()
    for name in ("x.npy", "x.npz", "two.npz", "t.csv", "t.txt"):
        result = predict(run, tmp_path / name, tmp_path / "a.jsonl")
        assert result.failed == 0, name
        found = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
        assert [row["label"] for row in found] == expected, name
        assert found[3]["name"] == f"{tmp_path / name}[3]"
    (tmp_path / "urls.csv").write_text("path\nmemory://deploy/0.png\n")
    assert predict(run, tmp_path / "urls.csv", tmp_path / "u.csv").failed == 1  # a table fetches nothing
    assert "The table names the URL" in (tmp_path / "u.csv").read_text()
    predict(run, str(folder / "*" / "*.png"), tmp_path / "g.jsonl")
    assert len((tmp_path / "g.jsonl").read_text().splitlines()) == 40


def test_parquet_columns_and_text_tables_of_numbers_are_inputs(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    contract = InputContract({"x": TensorSummary("float32", (3,), -1.0, 1.0)}, 2, ())
    parquet.write_table(arrow.table({"a": [0.5, 1.0], "b": [1.0, 2.0], "c": [0.0, 3.0]}), tmp_path / "t.parquet")
    (tmp_path / "t.csv").write_text("a;b;c\n".replace(";", ",") + "0.5,1,0\n1,2,word\n1,2\n")
    (tmp_path / "t.txt").write_text("0.5 1 0\n1 2 3\n")
    for name in ("t.parquet", "t.txt"):
        refs = list_inputs([str(tmp_path / name)], contract)
        reader = InputReader(contract)
        assert [prepare(reader.read(ref), contract).arrays["x"].tolist() for ref in refs] == [
            [[0.5, 1, 0]],
            [[1, 2, 3]],
        ]
    reader = InputReader(contract, ("c", "b", "a"))
    refs = list_inputs([str(tmp_path / "t.csv")], contract, ("c", "b", "a"))
    assert prepare(reader.read(refs[0]), contract).arrays["x"].tolist() == [[0, 1, 0.5]]
    for ref in refs[1:]:
        with pytest.raises(DataError, match="could not convert string to float"):
            prepare(reader.read(ref), contract)
    (problem,) = list_inputs([str(tmp_path / "t.csv")], contract, ("d",))
    assert "no column 'd'; its columns are a, b, c" in (problem.problem or "")


def test_texts_are_read_from_lines_and_columns(tmp_path: Path) -> None:
    tokenizer = WordPiece("[PAD]\n[UNK]\n[CLS]\n[SEP]\na\nb", 8)
    summary = TensorSummary("int64", (8,), 0.0, 5.0)
    steps = Preprocessing(tokenizer=tokenizer)
    contract = InputContract(dict.fromkeys(tokenizer.outputs, summary), 2, (), preprocessing=steps)
    (tmp_path / "t.txt").write_text("a\tb\nb\ta b\nonly one\n")
    (tmp_path / "t.tsv").write_text("sentence2\tid\tsentence1\nb\t0\ta\na b\t1\tb\n")
    reader = InputReader(contract)
    lines, cells = (list_inputs([str(tmp_path / name)], contract) for name in ("t.txt", "t.tsv"))
    assert len(lines) == 3
    for line, cell in zip(lines[:2], cells, strict=True):
        one, other = (prepare(reader.read(ref), contract).arrays["input_ids"] for ref in (line, cell))
        assert np.array_equal(one, other)
    with pytest.raises(DataError, match="Expected: 2 texts"):
        prepare(reader.read(lines[2]), contract)


def test_named_arrays_are_read_from_npz(tmp_path: Path) -> None:
    summary = TensorSummary("int64", (2,), 0.0, 5.0)
    contract = InputContract({"a": summary, "b": summary}, 2, ())
    np.savez(tmp_path / "x.npz", a=np.zeros((3, 2), dtype=int), b=np.ones((3, 2), dtype=int))
    reader = InputReader(contract)
    refs = list_inputs([str(tmp_path / "x.npz")], contract)
    assert prepare(reader.read(refs[2]), contract).arrays["b"].tolist() == [[1, 1]]
    np.savez(tmp_path / "y.npz", a=np.zeros((3, 2), dtype=int))
    (ref,) = list_inputs([str(tmp_path / "y.npz")], contract)
    assert "contains the arrays ['a'], not b" in (ref.problem or "")


def test_urls_are_read_with_fsspec(run: Path, images: np.ndarray[Any, Any], tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    for number, image in enumerate(images[:5]):
        Image.fromarray(image[0], "L").save(tmp_path / "a.png")
        memory.pipe(f"/deploy/{number}.png", (tmp_path / "a.png").read_bytes())
    np.save(tmp_path / "x.npy", images[:5])
    memory.pipe("/deploy-array/x.npy", (tmp_path / "x.npy").read_bytes())
    expected = load_predictor(run)(images[:5]).label.tolist()
    for url in ("memory://deploy", "memory://deploy/*.png", "memory://deploy-array/x.npy"):
        predict(run, url, tmp_path / "a.jsonl")
        found = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
        assert [row["label"] for row in found] == expected, url
        assert found[0]["name"].startswith("memory://")
    result = predict(run, "memory://deploy/none.png", tmp_path / "a.jsonl")
    assert result.failed == 1


def test_unreadable_files_are_rows_and_missing_ones_an_error(run: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.npy").write_bytes(b"\x93NUMPY")
    np.save(tmp_path / "nan.npy", np.full((2, 1, 8, 8), np.nan))
    np.save(tmp_path / "wide.npy", np.zeros((2, 1, 9, 8), dtype=np.uint8))
    files = [tmp_path / name for name in ("bad.npy", "nan.npy", "wide.npy")]
    result = predict(run, files, tmp_path / "a.csv")
    rows = read_csv(tmp_path / "a.csv")
    assert (result.inputs, result.failed) == (5, 5)
    for row, words in zip(rows, ["cannot be read", "NaN", "NaN", "Expected: [1, 8, 8]", "Expected"], strict=True):
        assert words in row["error"], row
    with pytest.raises(DataError, match="there is no such file or folder"):
        predict(run, tmp_path / "none.png", tmp_path / "b.csv")
    with pytest.raises(DataError, match="no file matches the pattern"):
        predict(run, str(tmp_path / "*.jpg"), tmp_path / "b.csv")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="contains no files that end in"):
        predict(run, tmp_path / "empty", tmp_path / "b.csv")
    (tmp_path / "a.doc").write_text("")
    with pytest.raises(DataError, match=r"a\.doc: the inputs of this model are"):
        predict(run, tmp_path / "a.doc", tmp_path / "b.csv")
    np.save(tmp_path / "zero.npy", np.zeros((0, 1, 8, 8), dtype=np.uint8))
    with pytest.raises(DataError, match="there are no inputs"):
        predict(run, tmp_path / "zero.npy", tmp_path / "b.csv")
    assert not (tmp_path / "b.csv.parts").exists()
    with pytest.raises(RecipeError, match=r"\.csv, \.jsonl, \.parquet, \.npz"):
        predict(run, files, tmp_path / "b.doc")


class Stopped(Exception):
    pass


def test_resuming_computes_only_missing_parts_and_writes_equal_bytes(
    run: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    predict(run, folder, tmp_path / "whole.csv", batch=SMALL)

    def stop(event: ProgressEvent) -> None:
        if isinstance(event, WorkDone) and event.done >= 21:
            raise Stopped

    out = tmp_path / "resumed.csv"
    with pytest.raises(Stopped):
        predict(run, folder, out, batch=SMALL, progress=stop)
    assert not out.exists()
    parts = tmp_path / "resumed.csv.parts"
    assert len(list(parts.glob("part-*.csv"))) == 3
    damaged = parts / "part-00001.csv"
    damaged.write_bytes(damaged.read_bytes()[:-3])
    (parts / "part-00002.json").unlink()
    computed: list[int] = []
    original = batch.predict_part
    monkeypatch.setattr(batch, "predict_part", lambda job, part: computed.append(part.number) or original(job, part))
    result = predict(run, folder, out, batch=SMALL)
    assert computed == [1, 2, 3, 4, 5]
    assert result.reused == 7
    assert out.read_bytes() == (tmp_path / "whole.csv").read_bytes()
    assert not parts.exists()


def test_a_resume_with_other_inputs_or_settings_is_refused(run: Path, folder: Path, tmp_path: Path) -> None:
    def stop(_: ProgressEvent) -> None:
        raise Stopped

    out = tmp_path / "a.csv"
    with pytest.raises(Stopped):
        predict(run, folder, out, batch=SMALL, progress=stop)
    with pytest.raises(RunError, match=r"other inputs or settings[\s\S]*ood_score"):
        predict(run, folder, out, batch=SMALL, ood_score="pds")
    with pytest.raises(RunError, match=r"inputs\.count: 40 -> 20"):
        predict(run, folder / "0", out, batch=SMALL)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("keep")
    with pytest.raises(RunError, match="is not the folder of a batch prediction"):
        predict(run, folder, tmp_path / "mine")
    assert (tmp_path / "mine" / "file").read_text() == "keep"


def test_a_folder_keeps_parts_and_lists_them(run: Path, folder: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    out = tmp_path / "predictions"
    assert predict(run, folder, out, batch=SMALL).inputs == 40
    manifest = json.loads((out / "manifest.json").read_text())
    assert [part["rows"] for part in manifest["parts"]] == [7, 7, 7, 7, 7, 5]
    assert parquet.read_table(out / manifest["parts"][5]["file"]).num_rows == 5
    assert predict(run, folder, out, batch=SMALL).reused == 40


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "plateaux", "predict", *map(str, arguments)]


ENV = {**os.environ, "PYTHONPATH": str(Path(plateaux.__file__).parents[1]), "OMP_NUM_THREADS": "1"}


def test_processes_write_the_bytes_of_one_process_also_after_a_kill(run: Path, folder: Path, tmp_path: Path) -> None:
    for copy in range(30):  # 1200 inputs are two parts
        shutil.copytree(folder / "0", tmp_path / "many" / f"{copy:02d}a")
        shutil.copytree(folder / "1", tmp_path / "many" / f"{copy:02d}b")
    predict(run, tmp_path / "many", tmp_path / "one.csv", batch={"threads": 1})
    out, parts = tmp_path / "two.csv", tmp_path / "two.csv.parts"
    arguments = command(run, tmp_path / "many", "-o", out, "--processes", 2, "--json")
    with subprocess.Popen(arguments, env=ENV, start_new_session=True) as process:
        while process.poll() is None and not list(parts.glob("part-*.json")):
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
    done = subprocess.run(arguments, env=ENV, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["inputs"] == 1200
    assert out.read_bytes() == (tmp_path / "one.csv").read_bytes()


def test_predict_takes_inputs_or_a_split_and_says_what_to_change(run: Path, folder: Path, tmp_path: Path) -> None:
    function: Any = predict
    out = tmp_path / "a.csv"
    with pytest.raises(RecipeError, match=r"Both inputs and split = 'test' were given\. Give one of them"):
        function(run, folder, out, split="test")
    with pytest.raises(RecipeError, match=r"Neither inputs nor a split were given\. Give one of them"):
        function(run)
    with pytest.raises(RecipeError, match="inputs were given without out"):
        function(run, folder)
    with pytest.raises(RecipeError, match="members and each_member belong to a split"):
        function(run, folder, out, members=[0])
    with pytest.raises(RecipeError, match="each_member was given without out"):
        function(run, split="test", each_member=True)
    with pytest.raises(RecipeError, match=r"written as \.npz"):
        function(run, split="test", each_member=True, out=out)
    with pytest.raises(RecipeError, match=r"batch \(part_size\) belongs to inputs"):
        function(run, split="test", batch=SMALL)
    with pytest.raises(RecipeError, match="batch has no setting 'proceses'; did you mean 'processes'"):
        function(run, folder, out, batch={"proceses": 2})
    with pytest.raises(RecipeError, match=r"\.csv, \.jsonl, \.parquet, \.npz"):
        predict(run, split="test", out=tmp_path / "a.doc")
    assert not out.exists()


def test_the_command_fails_if_no_input_could_be_predicted(run: Path, tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    for number in range(3):
        (tmp_path / "broken" / f"{number}.png").write_bytes(b"no image")
    code, out, message = call("predict", str(run), str(tmp_path / "broken"), "-o", str(tmp_path / "a.csv"))
    assert (code, "3 inputs could not be read" in out) == (3, True)
    assert "No input could be predicted" in message


def test_a_split_is_returned_and_written(run: Path, tmp_path: Path) -> None:
    found = predict(plateaux.Run.open(run), split="test@5", out=tmp_path / "a.csv", device="cpu")
    assert [row["label"] for row in read_csv(tmp_path / "a.csv")] == [str(label) for label in found.label]
    assert len(found) == 5


def test_the_logits_of_every_member_are_written_with_labels_and_ids(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "logits.npz"
    assert call("predict", str(run), "--split", "test", "--each-member", "-o", str(out))[0] == 0
    opened = plateaux.Run.open(run)
    with np.load(out, allow_pickle=False) as file:
        whole = {name: file[name] for name in file.files}
    expected = predict_all(Evaluator(opened), eval_split(opened.recipe, opened.info.data, "test"))
    np.testing.assert_array_equal(whole["logits"], expected.logits.numpy())
    np.testing.assert_array_equal(whole["labels"], expected.y.numpy())
    np.testing.assert_array_equal(whole["ids"], expected.ids.numpy())
    assert whole["members"].tolist() == opened.trained_members()
    answers = predict(run, split="validation@7", each_member=True, out=tmp_path / "v.npz", members=[1])
    assert np.load(tmp_path / "v.npz")["logits"].shape[:2] == (1, 7)
    assert np.load(tmp_path / "v.npz")["ids"].astype(str).tolist() == list(answers.names)
    monkeypatch.setattr(split_predictions, "MAX_FILE_BYTES", whole["logits"].nbytes - 1)
    (tmp_path / "logits").mkdir()
    (tmp_path / "logits" / "part-00009.npz").touch()  # of an earlier call
    predict(run, split="test", each_member=True, out=out)
    parts = sorted((tmp_path / "logits").iterdir())
    assert (len(parts), out.exists()) == (2, False)
    loaded = [np.load(part) for part in parts]
    for name, axis in (("logits", 1), ("labels", 0), ("ids", 0)):
        np.testing.assert_array_equal(np.concatenate([each[name] for each in loaded], axis), whole[name])


def test_the_command_predicts_inputs_and_splits(run: Path, folder: Path, tmp_path: Path) -> None:
    def predicted(*arguments: object) -> tuple[int, str, str]:
        return call("predict", str(run), *map(str, arguments))

    code, out, _ = predicted(folder, "-o", tmp_path / "a.csv", "--columns", "path", "--json")
    assert code == 0
    found = json.loads(out)
    assert found == {
        "out": str(tmp_path / "a.csv"),
        "inputs": 40,
        "failed": 0,
        "abstained": found["abstained"],
        "reused": 0,
    }
    assert predicted("-o", tmp_path / "b.csv", "--split", "test@10")[0] == 0
    assert len(read_csv(tmp_path / "b.csv")) == 10
    code, _, message = predicted("-o", tmp_path / "b.csv", "--split", "test", "--processes", 2)
    assert (code, "batch (processes) belongs to inputs" in message) == (2, True)
    code, _, message = predicted("-o", tmp_path / "b.csv")
    assert (code, "Neither inputs nor a split" in message) == (2, True)
    code, _, message = predicted(folder, "-o", tmp_path / "c.csv", "--members", "0")
    assert (code, "members and each_member belong to a split" in message) == (2, True)
    assert predicted(folder, "-o", tmp_path / "c.csv", "--split", "test")[0] == 2
    assert predicted(folder, "-o", tmp_path / "c.csv", "--address", "auto")[0] == 2
    assert predicted(folder, "-o", tmp_path / "c.doc")[0] == 2
