"""Folders that `save_pretrained` of transformers wrote become an ensemble."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hf_folders import TINY_BERT, save_model, save_texts, save_tokenizer
from safetensors.torch import load_file
from typer.testing import CliRunner

import plateaux
from plateaux.cli.main import app
from plateaux.core.errors import PlateauxError, RecipeError
from plateaux.core.imports import optional_import
from plateaux.integrations.huggingface_weights import check_class_order, class_names, read_folder_weights

transformers: Any = optional_import("transformers", extra="hf")
LABELS = ("negative", "neutral", "positive")


def config(**changes: Any) -> Any:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    names = dict(enumerate(LABELS))
    return transformers.BertConfig(
        **{"vocab_size": 20, "max_position_embeddings": 8, "id2label": names, **sizes, **changes}
    )


def network(seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    return transformers.BertForSequenceClassification(config(**changes)).eval()


def bert(*, classes: int) -> Any:
    return transformers.BertForSequenceClassification(config(num_labels=classes))


def data() -> plateaux.DataSplits:
    rng = np.random.default_rng(0)
    tokens = {"input_ids": rng.integers(1, 20, (90, 6)), "attention_mask": np.ones((90, 6), dtype=np.int64)}
    return plateaux.from_arrays(tokens, np.array(LABELS)[tokens["input_ids"][:, 0] % 3], test=0.5)


def recipe(members: int) -> plateaux.Recipe:
    tree = {"data": {"name": "arrays", "path": "data.safetensors"}, "model": {"name": "bert"}}
    return plateaux.Recipe.from_dict({"members": members, **tree})


def test_three_folders_are_evaluated_calibrated_and_cascaded(tmp_path: Path) -> None:
    for seed in range(3):
        network(seed).save_pretrained(tmp_path / f"seed{seed}")
    run = plateaux.import_weights(tmp_path / "run", recipe(3), [f"{tmp_path}/seed*"], data=data(), model=bert)
    assert run.info.imported_from == ("seed0", "seed1", "seed2")
    x, y = data().test.fetch(torch.arange(45))
    assert isinstance(x, dict)
    auto = transformers.AutoModelForSequenceClassification
    with torch.no_grad():
        logits = [auto.from_pretrained(tmp_path / f"seed{seed}").eval()(**x).logits for seed in range(3)]
    probabilities = torch.stack(logits).softmax(2).mean(0)
    torch.testing.assert_close(
        plateaux.load_predictor(plateaux.open_run(run, model=bert)).ensemble.predict(x), probabilities
    )
    accuracy = plateaux.evaluate(plateaux.open_run(run, model=bert), metrics="accuracy")["accuracy"].ensemble
    assert accuracy.value == pytest.approx(float((probabilities.argmax(1) == y).double().mean()))
    cascade = {"max_harm": 0.3, "confidence": 0.5}
    calibration = plateaux.calibrate(plateaux.open_run(run, model=bert), split="test", cascade=cascade)
    assert calibration.cascade is not None


@pytest.mark.parametrize("kind", ["one file", "several files", "one pickle", "several pickles"])
def test_weights_of_every_layout_of_a_folder_are_read(kind: str, tmp_path: Path) -> None:
    module = network()
    module.save_pretrained(tmp_path, max_shard_size="2KB" if "several" in kind else "5GB")
    files = sorted(tmp_path.glob("*.safetensors"))
    assert (len(files) > 1) == ("several" in kind)
    if "pickle" in kind:
        for file in files:
            torch.save(load_file(file), tmp_path / _pickled(file.name))
            file.unlink()
        for index in tmp_path.glob("*.index.json"):
            tree = json.loads(index.read_text())
            tree["weight_map"] = {name: _pickled(file) for name, file in tree["weight_map"].items()}
            (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(tree))
            index.unlink()
    found = read_folder_weights(tmp_path)
    assert found.keys() == module.state_dict().keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in module.state_dict().items())


def _pickled(name: str) -> str:
    return name.replace("model", "pytorch_model", 1).replace(".safetensors", ".bin")


def test_class_names_in_another_order_are_refused(tmp_path: Path) -> None:
    network().save_pretrained(tmp_path)
    assert class_names(tmp_path) == LABELS
    check_class_order(tmp_path, LABELS)
    check_class_order(tmp_path, ("0", "1", "2"))
    check_class_order(tmp_path, ())
    with pytest.raises(RecipeError, match="in another order"):
        check_class_order(tmp_path, ("positive", "neutral", "negative"))
    network(id2label={0: "LABEL_0", 1: "LABEL_1"}).save_pretrained(tmp_path / "numbered")
    assert class_names(tmp_path / "numbered") == ()


def test_another_number_of_classes_is_reported_with_both_shapes(tmp_path: Path) -> None:
    network(id2label={0: "a", 1: "b"}).save_pretrained(tmp_path / "two")
    with pytest.raises(RecipeError, match=r"classifier.weight \(2 x 8 in the file, 3 x 8 in the model\)"):
        plateaux.import_weights(tmp_path / "run", recipe(1), [tmp_path / "two"], data=data(), model=bert)


def test_an_adapter_without_its_base_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(RecipeError, match="merge_and_unload"):
        read_folder_weights(tmp_path)


@pytest.mark.parametrize(
    "index",
    [
        "no json",
        "[]",
        "{}",
        json.dumps({"weight_map": {"a": "../model.safetensors"}}),
        json.dumps({"weight_map": {"a": "/etc/passwd"}}),
        json.dumps({"weight_map": {"a": "weights.pkl"}}),
        json.dumps({"weight_map": {"a": "part.safetensors"}}),
    ],
)
def test_an_index_names_only_files_of_its_folder(index: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    network().save_pretrained(tmp_path)
    (tmp_path / "folder" / "model.safetensors.index.json").write_text(index)
    with pytest.raises(PlateauxError, match=r"[Ss]ave the model again|copy the complete folder"):
        read_folder_weights(tmp_path / "folder")


def test_one_command_makes_an_ensemble_of_folders_with_their_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_texts(tmp_path / "texts")
    networks = []
    for seed in range(3):
        save_tokenizer(tmp_path / "seeds" / str(seed))
        small = transformers.BertConfig(**TINY_BERT, num_labels=2)
        folder = tmp_path / "seeds" / str(seed)
        networks.append(save_model(folder, small, task="AutoModelForSequenceClassification", seed=seed))
    words = ["import-weights", "-o", "runs/bert", "--model", "hf:seeds/0", "--weights", "seeds/*"]
    result = CliRunner().invoke(app, [*words, "--data", "hf:texts", "--set", "data.length=12"])
    assert result.exit_code == 0, result.output
    run = plateaux.Run.open("runs/bert")
    for number, expected in enumerate(networks):
        weights = run.weights(number)
        assert all(torch.equal(weights[name], tensor) for name, tensor in expected.state_dict().items())
    assert len(plateaux.evaluate(run, metrics="accuracy")["accuracy"].members) == 3
