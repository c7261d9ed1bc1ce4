"""Adapters in the files of PEFT, compared with the real package in both directions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_folders import save_bert, save_texts, save_vit, transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import plateaux
from plateaux.core.errors import DataError, RecipeError
from plateaux.core.imports import optional_import
from plateaux.core.registry import model
from plateaux.integrations.peft_adapters import PREFIX, is_adapter, load_adapter
from plateaux.models.lora import LoRALinear, add_lora
from plateaux.storage.save_adapter import save_adapter

pytest.importorskip("transformers")
TARGETS = ["*.query", "*.value"]


def peft() -> Any:
    try:
        return optional_import("peft", extra="hf")
    except RecipeError:
        pytest.skip("peft is not installed")


def tokens() -> dict[str, Tensor]:
    ids = torch.randint(5, 21, (4, 12), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(12) < torch.tensor([[5], [8], [12], [12]])).long()
    return {"input_ids": ids * mask, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)}


def build(folder: Path, *, kind: str = "text") -> nn.Module:
    shape, classes = ((12,), 2) if kind == "text" else ((3, 16, 16), 3)
    network: nn.Module = model.get(f"hf:{folder}")(shape=shape, classes=classes)
    return network.eval()


def randomized(network: nn.Module) -> nn.Module:
    """Give the adapters and the head random weights."""
    generator = torch.Generator().manual_seed(7)
    for parameter in network.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.3, generator=generator)
    return network


def theirs_in_ours(folder: Path, base: str, x: Any, network: nn.Module, **options: Any) -> None:
    """Check that an adapter made by peft gives equal logits here."""
    library = peft()
    auto = transformers().AutoModelForSequenceClassification
    other = auto.from_pretrained(base, attn_implementation="eager", local_files_only=True)
    config = library.LoraConfig(**{"r": 3, "lora_alpha": 5, "target_modules": ["query", "value"], **options})
    adapted = randomized(library.get_peft_model(other, config).eval())
    adapted.save_pretrained(folder)
    before = network(**x)
    load_adapter(network, folder)
    with torch.no_grad():
        expected, found = adapted(**x).logits, network(**x)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert (found - before).abs().max() > 0.01


def test_an_adapter_of_peft_gives_equal_logits_here(tmp_path: Path) -> None:
    save_bert(tmp_path / "bert")
    one = build(tmp_path / "bert")
    theirs_in_ours(tmp_path / "a", str(tmp_path / "bert"), tokens(), one, modules_to_save=["classifier"])
    assert {name for name, part in one.named_modules() if isinstance(part, LoRALinear)} == {
        f"bert.encoder.layer.{number}.attention.self.{name}" for number in (0, 1) for name in ("query", "value")
    }
    trained = {name for name, parameter in one.named_parameters() if parameter.requires_grad}
    assert {name for name in trained if "down" not in name and "up." not in name} == {
        "classifier.weight", "classifier.bias",
    }  # fmt: skip


def test_a_network_with_adapters_takes_those_of_peft_if_they_have_the_same_layers(tmp_path: Path) -> None:
    save_bert(tmp_path / "bert")
    one = build(tmp_path / "bert")
    add_lora(one, rank=3, alpha=5.0, target_modules=TARGETS, modules_to_save=[])
    theirs_in_ours(tmp_path / "a", str(tmp_path / "bert"), tokens(), one)  # the head is that of the base
    other = build(tmp_path / "bert")
    add_lora(other, rank=4, alpha=5.0, target_modules=TARGETS)
    with pytest.raises(RecipeError, match=r"rank 3, alpha 5, and 4 layers.*Set the same values"):
        load_adapter(other, tmp_path / "a")


@pytest.mark.parametrize("kind", ["text", "image"])
def test_an_adapter_from_here_gives_equal_logits_in_peft(tmp_path: Path, kind: str) -> None:
    library = peft()
    (save_bert if kind == "text" else save_vit)(tmp_path / "base")
    one = build(tmp_path / "base", kind=kind)
    targets = TARGETS if kind == "text" else ["*.q_proj", "*.v_proj"]
    add_lora(one, rank=2, alpha=6.0, target_modules=targets)
    randomized(one)
    save_adapter(one, tmp_path / "a", base_model=str(tmp_path / "base"))
    assert is_adapter(tmp_path / "a")
    assert not list((tmp_path / "a").glob(".*"))
    task = "AutoModelForSequenceClassification" if kind == "text" else "AutoModelForImageClassification"
    base = getattr(transformers(), task).from_pretrained(tmp_path / "base", attn_implementation="eager")
    adapted = library.PeftModel.from_pretrained(base, tmp_path / "a").eval()
    x = tokens() if kind == "text" else {
        "pixel_values": torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    }  # fmt: skip
    with torch.no_grad():
        torch.testing.assert_close(one(**x), adapted(**x).logits, rtol=0, atol=1e-6)
    again = build(tmp_path / "base", kind=kind)
    load_adapter(again, tmp_path / "a")
    with torch.no_grad():
        assert torch.equal(again(**x), one(**x))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_dora": True}, "sets use_dora. Only plain LoRA"),
        ({"use_rslora": True}, "sets use_rslora"),
        ({"init_lora_weights": "pissa"}, "sets init_lora_weights"),
        ({"rank_pattern": {"query": 4}}, "sets rank_pattern"),
        ({"bias": "all"}, "bias = all"),
        ({"peft_type": "IA3"}, "peft_type = IA3"),
        ({"r": 10**9}, r"r = 1000000000"),
        ({"r": "2"}, r"r = '2'"),
    ],
)
def test_other_variants_of_adapters_are_refused_by_name(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    save_bert(tmp_path / "base")
    one = build(tmp_path / "base")
    add_lora(one, rank=2, alpha=6.0, target_modules=TARGETS)
    save_adapter(one, tmp_path / "a")
    file = tmp_path / "a" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(RecipeError, match=message):
        load_adapter(build(tmp_path / "base"), tmp_path / "a")


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    save_bert(tmp_path / "base")
    save_bert(tmp_path / "wide", hidden_size=32)
    one = build(tmp_path / "base")
    with pytest.raises(RecipeError, match="has no LoRA adapters to save"):
        save_adapter(one, tmp_path / "a")
    add_lora(one, rank=2, alpha=6.0, target_modules=TARGETS)
    save_adapter(one, tmp_path / "a")
    assert all(tensor.ndim for tensor in load_file(tmp_path / "a" / "adapter_model.safetensors").values())
    with pytest.raises(RecipeError, match="does not match BertForSequenceClassification"):
        load_adapter(build(tmp_path / "wide"), tmp_path / "a")
    with pytest.raises(RecipeError, match="no linear layer of Sequential"):
        load_adapter(nn.Sequential(nn.Linear(2, 2)), tmp_path / "a")
    with pytest.raises(DataError, match=r"has no adapter_config\.json"):
        load_adapter(build(tmp_path / "base"), tmp_path)
    (tmp_path / "a" / "adapter_model.safetensors").rename(tmp_path / "a" / "adapter_model.bin")
    with pytest.raises(RecipeError, match="pickled adapters are not read"):
        load_adapter(build(tmp_path / "base"), tmp_path / "a")
    with pytest.raises(RecipeError, match=r"contains a PEFT adapter.*folder of its base model"):
        build(tmp_path / "a")


def test_adapters_of_peft_become_the_members_of_a_run(tmp_path: Path) -> None:
    save_bert(tmp_path / "base")
    save_texts(tmp_path / "texts")
    x, expected = tokens(), []
    for number in range(2):
        one = build(tmp_path / "base")
        add_lora(one, rank=2, alpha=6.0, target_modules=TARGETS)
        for parameter in one.parameters():
            if parameter.requires_grad:
                nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(number))
        save_adapter(one, tmp_path / f"adapter-{number}")
        expected.append(one(**x).detach())
    recipe = plateaux.Recipe.from_dict(
        {
            "members": 2,
            "data": {"name": f"hf:{tmp_path / 'texts'}", "length": 12},
            "model": {"name": f"hf:{tmp_path / 'base'}", "lora": {"rank": 2, "alpha": 6, "target_modules": TARGETS}},
        }
    )
    run = plateaux.import_weights(tmp_path / "run", recipe, [str(tmp_path / f"adapter-{n}") for n in range(2)])
    ensemble = plateaux.load_predictor(run, device="cpu").ensemble
    for member, logits in zip(ensemble.members, expected, strict=True):
        torch.testing.assert_close(member(**x), logits, rtol=0, atol=1e-6)
    assert not torch.equal(expected[0], expected[1])


def test_an_adapter_has_all_tensors_that_the_network_trains_and_no_others(tmp_path: Path) -> None:
    save_bert(tmp_path / "base")
    one = build(tmp_path / "base")
    add_lora(one, rank=2, alpha=6.0, target_modules=TARGETS)
    save_adapter(one, tmp_path / "a")
    file = tmp_path / "a" / "adapter_model.safetensors"
    content = load_file(file)
    load_adapter(one, tmp_path / "a")
    with_less = build(tmp_path / "base")
    add_lora(with_less, rank=2, alpha=6.0, target_modules=TARGETS, modules_to_save=[])
    with pytest.raises(RecipeError, match=r"has classifier\.weight, which.*does not train. Add 'classifier' to lora"):
        load_adapter(with_less, tmp_path / "a")
    headless = {name: tensor for name, tensor in content.items() if "classifier" not in name}
    save_file(headless, file, {"format": "pt"})
    for name in ("classifier.weight", "classifier.bias"):
        with pytest.raises(RecipeError, match=rf"has no {name}, which.*SEQ_CLS.*lora\.modules_to_save = \[\]"):
            load_adapter(one, tmp_path / "a")
        save_file({**headless, f"{PREFIX}classifier.weight": content[f"{PREFIX}classifier.weight"]}, file)
    save_file(headless, file, {"format": "pt"})
    load_adapter(with_less, tmp_path / "a")


def test_an_adapter_is_not_imported_without_lora_in_the_recipe(tmp_path: Path) -> None:
    save_bert(tmp_path / "base")
    save_texts(tmp_path / "texts")
    one = build(tmp_path / "base")
    add_lora(one, rank=2, alpha=6.0, target_modules=TARGETS)
    save_adapter(one, tmp_path / "adapter")
    recipe = plateaux.Recipe.from_dict(
        {
            "members": 1,
            "data": {"name": f"hf:{tmp_path / 'texts'}", "length": 12},
            "model": {"name": f"hf:{tmp_path / 'base'}"},
        }
    )
    with pytest.raises(RecipeError, match=r"a PEFT adapter without its base model.*merge_and_unload.*\[model\.lora\]"):
        plateaux.import_weights(tmp_path / "run", recipe, [str(tmp_path / "adapter")])
    assert not (tmp_path / "run").exists()
