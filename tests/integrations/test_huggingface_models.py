"""Models of transformers: equal logits, heads, weights, safe reading of folders, and runs that need no folder."""

from __future__ import annotations

import json
import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import rewrite
from hf_folders import (
    TINY_BERT,
    TINY_VIT,
    save_bert,
    save_model,
    save_pictures,
    save_texts,
    save_vit,
    sentences,
    transformers,
)
from safetensors.torch import load_file, save_file
from token_networks import check_padding, check_vmap
from torch import Tensor, nn

import plateaux
from plateaux.core.errors import DataError, PlateauxError, RecipeError
from plateaux.core.imports import optional_import
from plateaux.core.registry import model

pytest.importorskip("transformers")
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
TEXT: dict[str, dict[str, Any]] = {
    "Bert": TINY_BERT,
    "Roberta": {**TINY_BERT, "type_vocab_size": 1},
    "DistilBert": {"vocab_size": 21, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24},
    "Electra": {**TINY_BERT, "embedding_size": 8},
    "DebertaV2": {**TINY_BERT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "type_vocab_size": 0},
    "Albert": {**TINY_BERT, "embedding_size": 8},
    "GPT2": {"vocab_size": 21, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 24, "pad_token_id": 0},
    "OPT": {
        "vocab_size": 21, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 24,
        "max_position_embeddings": 24, "word_embed_proj_dim": 16, "pad_token_id": 0,
    },
    "Esm": {**TINY_BERT, "pad_token_id": 0, "mask_token_id": 4},
    "Longformer": {**TINY_BERT, "attention_window": 4, "pad_token_id": 0},
    "EuroBert": {**TINY_BERT, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0},
    "ModernBert": {**TINY_BERT, "local_attention": 4, "pad_token_id": 0, "cls_token_id": 2, "sep_token_id": 3},
}  # fmt: skip
IMAGE: dict[str, dict[str, Any]] = {
    "ViT": TINY_VIT,
    "DeiT": TINY_VIT,
    "Swin": {
        "image_size": 16,
        "patch_size": 2,
        "embed_dim": 8,
        "depths": [1, 1],
        "num_heads": [1, 2],
        "window_size": 4,
    },
    "ResNet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"},
    "ConvNext": {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2},
}
TOWER = {**SMALL, "projection_dim": 8, "num_hidden_layers": 1}
WITHOUT_BASE: dict[str, dict[str, Any]] = {  # their classes have no part that is called like their base model
    "CLIP": {
        "text_config": {**TOWER, "vocab_size": 21},
        "vision_config": {**TOWER, "image_size": 16, "patch_size": 8},
    },
    "Siglip": {
        "text_config": {**TOWER, "vocab_size": 21},
        "vision_config": {**TOWER, "image_size": 16, "patch_size": 8},
    },
    "HGNetV2": {
        "stem_channels": [3, 8, 8], "stage_in_channels": [8], "stage_mid_channels": [8], "stage_out_channels": [16],
        "stage_num_blocks": [1], "stage_numb_of_layers": [1], "stage_downsample": [False],
        "stage_light_block": [False], "stage_kernel_size": [3], "depths": [1], "hidden_sizes": [16],
        "embedding_size": 8,
    },
    "PPLCNet": {},
}  # fmt: skip
LAST_LAYERS = {"HGNetV2": "fc", "PPLCNet": "head"}
VMAP = ("Bert", "DistilBert", "Electra")


def tokens(count: int = 4, *, length: int = 12, low: int = 5) -> dict[str, Tensor]:
    ids = torch.randint(low, 21, (count, length), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(length) < torch.arange(count)[:, None] % 4 + 8).long()
    return {"input_ids": ids * mask, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)}


def build(folder: Path, *, shape: tuple[int, ...] = (12,), classes: int = 2, seed: int = 0, **options: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return model.get(f"hf:{folder}")(shape=shape, classes=classes, **options)


def save(folder: Path, name: str, **changes: Any) -> Any:
    sizes, task = (TEXT[name], "Sequence") if name in TEXT else (IMAGE[name], "Image")
    config = getattr(transformers(), f"{name}Config")(**{**sizes, **changes})
    return save_model(folder, config, task=f"AutoModelFor{task}Classification")


@pytest.mark.parametrize(
    ("name", "attention"),
    [*((name, "plain") for name in [*TEXT, *IMAGE]), *((name, "fused") for name in ("Bert", "Roberta", "ViT"))],
)
def test_logits_equal_those_of_transformers(tmp_path: Path, name: str, attention: str) -> None:
    other = save(tmp_path / "m", name, num_labels=3)
    shape = (12,) if name in TEXT else (3, 16, 16)
    one = build(tmp_path / "m", shape=shape, classes=3, attention=attention).eval()
    assert list(one.state_dict()) == list(other.state_dict())
    x = tokens() if name in TEXT else torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    plain = {key: value for key, value in x.items() if key != "token_type_ids"} if isinstance(x, dict) else {}
    x = plain if name == "GPT2" else x  # it embeds token types as words
    with torch.no_grad():
        expected = other(**plain).logits if plain else other(x).logits
        found = one(**x) if isinstance(x, dict) else one(x)  # a model without token types drops them
    assert expected.std(0).max() > 1e-3
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)


def test_a_decoder_keeps_its_causal_mask(tmp_path: Path) -> None:
    save(tmp_path / "m", "GPT2")
    one, hidden, x = build(tmp_path / "m").eval(), [], tokens(1)
    one.transformer.register_forward_hook(lambda _, __, output: hidden.append(output[0]))
    for last in (5, 20):
        x["input_ids"][0, 7] = last
        one(**x)
    assert x["attention_mask"].sum() == 8
    assert torch.equal(hidden[0][:, :7], hidden[1][:, :7])
    assert not torch.equal(hidden[0][:, 7], hidden[1][:, 7])


@pytest.mark.parametrize("name", VMAP)
def test_texts_support_vmap_and_padding_does_not_matter(tmp_path: Path, name: str) -> None:
    for seed in (0, 1):
        save(tmp_path / str(seed), name)
    networks = [build(tmp_path / str(seed)).eval() for seed in (0, 1)]
    check_padding(networks[0], tokens(), length=8)
    check_vmap(networks, tokens())


def test_a_head_of_other_classes_is_new_and_differs_between_members(tmp_path: Path) -> None:
    saved = save_bert(tmp_path / "m", labels=2).state_dict()
    same = build(tmp_path / "m", classes=2, seed=5).state_dict()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in same.items())
    one, again, other = (build(tmp_path / "m", classes=4, seed=seed).state_dict() for seed in (5, 5, 6))
    assert one["classifier.weight"].shape == (4, 16)
    assert torch.equal(one["classifier.weight"], again["classifier.weight"])
    assert not torch.equal(one["classifier.weight"], other["classifier.weight"])
    assert all(torch.equal(one[name], saved[name]) for name in saved if not name.startswith("classifier"))


def test_a_checkpoint_of_pretraining_gives_the_base_and_a_new_head(tmp_path: Path) -> None:
    saved = save_bert(tmp_path / "m", task="AutoModelForMaskedLM").state_dict()
    found = build(tmp_path / "m").state_dict()
    shared = [name for name in found if name in saved]
    assert len(shared) > 30
    assert all(torch.equal(found[name], saved[name]) for name in shared)
    assert {name.split(".")[0] for name in set(found) - set(shared)} == {"classifier", "bert"}  # bert.pooler


def test_random_weights_come_from_the_seed_only(tmp_path: Path) -> None:
    save_bert(tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").unlink()
    one, again, other = (build(tmp_path / "m", seed=seed, pretrained=False).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[name], again[name]) for name in one)
    name = "bert.encoder.layer.0.attention.self.query.weight"
    assert not torch.equal(one[name], other[name])
    with pytest.raises(RecipeError, match=r"has no model\.safetensors; pickled weights.*model\.pretrained = false"):
        build(tmp_path / "m")


class _Touch:
    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return (open, (self.marker, "w"))


def test_pickled_weights_and_code_of_a_folder_are_not_executed(tmp_path: Path) -> None:
    save_bert(tmp_path / "m")
    folder, marker = tmp_path / "m", tmp_path / "marker"
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(_Touch(str(marker))))
    code = f"open({str(marker)!r}, 'w')\nclass Evil: pass\n"
    for name in ("modeling_evil.py", "configuration_evil.py", "tokenization_evil.py", "__init__.py"):
        (folder / name).write_text(code)
    config = json.loads((folder / "config.json").read_text())
    names = {"AutoConfig": "configuration_evil.Evil", "AutoModelForSequenceClassification": "modeling_evil.Evil"}
    for kind in ("bert", "evil"):
        (folder / "config.json").write_text(json.dumps({**config, "model_type": kind, "auto_map": names}))
        for options in ({}, {"pretrained": False}):
            if kind == "bert" and options:
                assert build(folder, **options) is not None
                continue
            with pytest.raises(RecipeError, match="pickled weights" if kind == "bert" else "never executed"):
                build(folder, **options)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": None}, "no model of the type None"),
        ({"model_type": "clip"}, "for SequenceClassification"),
        ({"model_type": ["bert"]}, "no model of the type"),
        ({"model_type": "timm_wrapper", "architecture": "hf_hub:evil/x"}, 'set model.name = "timm:NAME"'),
        ({"vision_config": {"model_type": "timm_backbone"}}, 'set model.name = "timm:NAME"'),
        ({"parts": [{"model_type": "gemma3n_vision", "architecture": "hf_hub:evil/x"}]}, "sets architecture"),
        ({"vision_config": {"model_type": "detr", "use_timm_backbone": False}}, "'detr', which names a backbone"),
        ({"text_config": {"auto_map": {"AutoModel": "evil/x--evil.Evil"}}}, "sets auto_map"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "sets quantization_config"),
        ({"hidden_size": 17}, "cannot build the model"),
        ({"hidden_size": 32, "num_attention_heads": 2}, "are missing or have another shape"),
        ({"num_hidden_layers": 3}, "are missing or have another shape"),
        ({"hidden_size": "many"}, "cannot build the model"),
        ({"max_position_embeddings": 8}, "Set data.length to at most 8"),
    ],
)
def test_wrong_configurations_are_explained(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    save_bert(tmp_path / "m")
    file = tmp_path / "m" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(RecipeError, match=message):
        build(tmp_path / "m")


def test_inputs_of_another_kind_are_explained(tmp_path: Path) -> None:
    save_bert(tmp_path / "bert")
    save_vit(tmp_path / "vit")
    for folder, shape, message in (
        ("bert", (3, 16, 16), "for ImageClassification, which inputs of shape"),
        ("vit", (12,), "for SequenceClassification"),
        ("vit", (3, 32, 32), r"images of 16 x 16 pixels.*Set model.image_size = 16"),
        ("vit", (1, 16, 16), "images of 3 channels"),
        ("vit", (2,) * 4, "Expected: tokens"),
    ):
        with pytest.raises(RecipeError, match=message):
            build(tmp_path / folder, shape=shape, classes=3)


@pytest.mark.parametrize("name", ["CLIP", "Siglip", "HGNetV2", "PPLCNet"])
def test_missing_weights_below_the_last_layer_are_an_error_without_a_base_model(tmp_path: Path, name: str) -> None:
    config = getattr(transformers(), f"{name}Config")(**WITHOUT_BASE[name], num_labels=3)
    saved = save_model(tmp_path / "m", config, task="AutoModelForImageClassification").state_dict()
    file = tmp_path / "m" / "model.safetensors"
    last = LAST_LAYERS.get(name, "classifier")
    content = load_file(file)
    rest = {key: tensor for key, tensor in content.items() if not key.startswith(f"{last}.")}
    assert 0 < len(content) - len(rest) <= 2
    save_file(rest, file, {"format": "pt"})
    one, other = (build(tmp_path / "m", shape=(3, 16, 16), classes=3, seed=seed).state_dict() for seed in (1, 2))
    assert all(torch.equal(one[key], saved[key]) for key in saved if not key.startswith(f"{last}."))
    assert not torch.equal(one[f"{last}.weight"], other[f"{last}.weight"])
    wide = build(tmp_path / "m", shape=(3, 16, 16), classes=5).state_dict()
    assert wide[f"{last}.weight"].shape[0] == 5
    first = sorted(rest)[0]
    for part in ({}, {key: tensor for key, tensor in rest.items() if key != first}):
        save_file({**part, **{key: content[key] for key in content if key not in rest}}, file, {"format": "pt"})
        with pytest.raises(RecipeError, match="does not have all weights"):
            build(tmp_path / "m", shape=(3, 16, 16), classes=3)


def test_the_vision_part_of_a_pretrained_clip_is_a_base(tmp_path: Path) -> None:
    saved = save_model(tmp_path / "m", transformers().CLIPConfig(**WITHOUT_BASE["CLIP"]), task="AutoModel").state_dict()
    found = build(tmp_path / "m", shape=(3, 16, 16), classes=3).state_dict()
    shared = [name for name in found if name in saved]
    assert {name for name in found if name not in shared} == {"classifier.weight", "classifier.bias"}
    assert all(torch.equal(found[name], saved[name]) for name in shared)


@pytest.mark.parametrize("size", [[16], [16, 16, 16], ["16", "16"], {"height": 16}, "16"])
def test_a_wrong_image_size_of_a_configuration_is_explained(tmp_path: Path, size: Any) -> None:
    save_vit(tmp_path / "m")
    file = tmp_path / "m" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "image_size": size}))
    with pytest.raises(RecipeError, match="image_size"):
        build(tmp_path / "m", shape=(3, 16, 16), classes=3)


def test_building_a_model_makes_no_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = optional_import("huggingface_hub", extra="hf")

    def from_config(*_: Any, **__: Any) -> Any:
        return hub.HfApi().model_info("evil/x")

    save_bert(tmp_path / "m")
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(transformers().AutoModelForSequenceClassification, "from_config", from_config)
    with pytest.raises(RecipeError, match="offline mode is enabled"):
        build(tmp_path / "m", pretrained=False)
    assert not hub.constants.HF_HUB_OFFLINE


def test_shards_outside_of_the_folder_are_not_read(tmp_path: Path) -> None:
    save_bert(tmp_path / "m")
    weights = load_file(tmp_path / "m" / "model.safetensors")
    save_file(weights, tmp_path / "outside.safetensors", {"format": "pt"})
    (tmp_path / "m" / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, "../outside.safetensors")}
    (tmp_path / "m" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(RecipeError, match="names files that are no safetensors files of its folder"):
        build(tmp_path / "m")
    save_file(weights, tmp_path / "m" / "part.safetensors", {"format": "pt"})
    index["weight_map"] = dict.fromkeys(weights, "part.safetensors")
    (tmp_path / "m" / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(build(tmp_path / "m").state_dict()["classifier.weight"], weights["classifier.weight"])


def test_links_below_a_run_are_not_followed(tmp_path: Path) -> None:
    save_bert(tmp_path / "m")
    (tmp_path / "linked").symlink_to(tmp_path / "m")
    assert build(tmp_path / "linked") is not None  # a folder of the user
    run = tmp_path / "run"
    shutil.copytree(tmp_path / "m", run / "m")
    (run / "run.json").write_text("{}")
    assert build(run / "m") is not None
    (run / "n").symlink_to(tmp_path / "m")
    with pytest.raises(DataError, match="n is a link in the folder of a run"):
        build(run / "n")
    (run / "m" / "model.safetensors").unlink()
    (run / "m" / "model.safetensors").symlink_to(tmp_path / "m" / "model.safetensors")
    with pytest.raises(DataError, match=r"model\.safetensors is a link in the folder of a run"):
        build(run / "m")


def test_names_of_the_hub_need_download_and_paths_are_never_names(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"--download \(in Python: download=True\), or give the path of a local") as e:
        build(Path("someone/no-such-model"))
    assert str(e.value).count(". ") == 0  # one sentence
    for name in ("./someone/model", "../model", "/no/such/model", "a/b/c"):
        with pytest.raises(DataError, match="there is no such folder"):
            build(name)  # type: ignore[arg-type]


def recipe(model_name: Any, folder: Path, **sections: Any) -> plateaux.Recipe:
    tree: dict[str, Any] = {
        "members": 2, "model": {"name": model_name}, "data": {"name": f"hf:{folder}", "batch_size": 12},
        "optimizer": {"name": "AdamW", "lr": 0.005}, "train": {"epochs": 1}, "executor": {"threads": 1},
    }  # fmt: skip
    for name, section in sections.items():
        tree[name] = {**tree[name], **section}
    return plateaux.Recipe.from_dict(tree)


def test_a_run_needs_neither_the_folder_of_the_model_nor_that_of_the_data(tmp_path: Path) -> None:
    save_bert(tmp_path / "m")
    save_texts(tmp_path / "d")
    chosen = recipe(f"hf:{tmp_path / 'm'}", tmp_path / "d", data={"length": 12})
    run = plateaux.train(chosen, tmp_path / "run")
    texts, _ = sentences(5)
    before = plateaux.load_predictor(run)(texts)
    for name in ("m", "d"):
        shutil.rmtree(tmp_path / name)
    after = plateaux.load_predictor(tmp_path / "run")(texts)
    assert np.array_equal(before.probabilities, after.probabilities)
    assert before.class_names == after.class_names == ("late", "early")
    with pytest.raises(PlateauxError, match="no such folder"):
        plateaux.train(chosen, tmp_path / "other")


def test_a_hostile_configuration_in_a_run_is_an_error(tmp_path: Path) -> None:
    save_bert(tmp_path / "m")
    save_texts(tmp_path / "d")
    run = plateaux.train(recipe(f"hf:{tmp_path / 'm'}", tmp_path / "d", data={"length": 12}), tmp_path / "run")
    name = run.recipe.model.name
    for config in ({"model_type": "evil"}, {"model_type": "bert", "hidden_size": -1}, {}):
        hostile = replace(run, info=replace(run.info, model_configs={name: config}))
        rewrite(hostile)
        with pytest.raises(PlateauxError):
            plateaux.load_predictor(tmp_path / "run")


@pytest.mark.parametrize("mode", ["loop", "vmap"])
def test_members_with_adapters_share_the_base(tmp_path: Path, mode: str) -> None:
    save_bert(tmp_path / "m", labels=5)  # a new head
    save_texts(tmp_path / "d")
    lora = {"rank": 2, "target_modules": ["*.query"]}
    made = recipe(
        f"hf:{tmp_path / 'm'}", tmp_path / "d", data={"length": 12}, model={"lora": lora}, executor={"mode": mode},
        train={"randomness": "different"},
    )  # fmt: skip
    run = plateaux.train(made, tmp_path / mode)
    saved = load_file(tmp_path / "m" / "model.safetensors")
    name = "bert.encoder.layer.0.output.dense.weight"
    assert torch.equal(run.shared()[name], saved[name])
    names = {name for name in run.weights(0) if "down" not in name and "up" not in name}
    assert names == {"classifier.weight", "classifier.bias"}
    assert not torch.equal(run.weights(0)["classifier.weight"], run.weights(1)["classifier.weight"])


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("kind", ["text", "image"])
def test_a_frozen_backbone_gives_the_features_before_the_last_layer(tmp_path: Path, kind: str, cache: bool) -> None:
    other = (save_bert if kind == "text" else save_vit)(tmp_path / "m")
    (save_texts if kind == "text" else save_pictures)(tmp_path / "d")
    part = {"backbone": "features", "head": "linear", "cache_features": cache}
    made = recipe(f"hf:{tmp_path / 'm'}", tmp_path / "d", model=part, data={"length": 12} if kind == "text" else {})
    run = plateaux.train(made, tmp_path / "run")
    assert {name.split(".")[0] for name in run.weights(0)} == {"head"}
    member = plateaux.load_predictor(run, device="cpu").ensemble.members[0]
    features: list[Tensor] = []
    layer: nn.Linear = other.classifier
    layer.register_forward_pre_hook(lambda _, args: features.append(args[0]))
    x: Any = tokens() if kind == "text" else torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        other(**x) if kind == "text" else other(x)
        found = member(**x) if kind == "text" else member(x)
        torch.testing.assert_close(found, member.head(features[0]), rtol=0, atol=1e-6)  # type: ignore[operator]


def test_members_can_be_different_models(tmp_path: Path) -> None:
    save_bert(tmp_path / "a")
    save(tmp_path / "b", "DistilBert")
    save_texts(tmp_path / "d")
    names = [f"hf:{tmp_path / name}" for name in "ab"]
    with pytest.raises(RecipeError, match=r"data\.vocabulary is not set"):
        plateaux.train(recipe(names, tmp_path / "d"), tmp_path / "run")
    made = recipe(names, tmp_path / "d", data={"length": 12, "vocabulary": str(tmp_path / "a")})
    run = plateaux.train(made, tmp_path / "run")
    shutil.rmtree(tmp_path / "a")
    assert plateaux.load_predictor(run)(sentences(3)[0]).probabilities.shape == (3, 2)
