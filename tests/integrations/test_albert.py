"""ALBERT: compared with transformers, with shared layers, vmap, per-sample scores, and full runs on a dev split."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import distance, weights
from reference.gradient_norms import gradient_norms
from safetensors.torch import load_file, save_file
from token_networks import check_padding, check_vmap, tokens
from torch import nn

import plateaux
from plateaux.config.recipe import Recipe
from plateaux.core.errors import RecipeError
from plateaux.core.member import MemberModule
from plateaux.core.types import Batch
from plateaux.integrations.text_models import albert
from plateaux.optim.grad_norms import squared_norms
from plateaux.training.train import train

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")

SMALL: dict[str, Any] = {
    "vocabulary": 24, "embedding": 8, "width": 16, "depth": 3, "heads": 2, "hidden": 24, "positions": 12,
}  # fmt: skip
PUBLISHED_HEADS = {"predictions.bias": torch.zeros(24), "sop_classifier.classifier.weight": torch.zeros(2, 16)}
WORDS = [f"▁w{number}" for number in range(16)]
PIECES = ["<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]", "▁", "w", "s", *WORDS]


def net(*, seed: int = 0, **options: Any) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return albert(shape=(12,), classes=2, **{**SMALL, **options})


def transformers_model(**options: Any) -> Any:
    library = pytest.importorskip("transformers")
    config = library.AlbertConfig(
        vocab_size=24, embedding_size=8, hidden_size=16, num_hidden_layers=3, num_attention_heads=2,
        intermediate_size=24, max_position_embeddings=12, hidden_act="gelu_new", num_labels=2, **options,
    )  # fmt: skip
    return library.AlbertForSequenceClassification(config).eval()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_its_logits_equal_those_of_transformers(attention: str) -> None:
    one, other = net().eval(), transformers_model(attn_implementation=attention)
    for param in one.parameters():  # larger than at initialization, where the logits are almost 0
        nn.init.normal_(param, std=0.3, generator=torch.Generator().manual_seed(param.numel()))
    other.load_state_dict(one.state_dict(), strict=True)
    with torch.no_grad():
        expected, found = other(**tokens(24)).logits, one(**tokens(24))
    assert found.std() > 0.1
    if attention == "eager":
        assert torch.equal(found, expected)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_the_default_is_albert_base_v2() -> None:
    """The sizes of the published config.json, and 11.7 million parameters: 12 layers would have 85 million more."""
    with torch.device("meta"):
        one = albert(shape=(128,), classes=2)
    sizes = {name: tuple(tensor.shape) for name, tensor in one.named_parameters()}
    layer = "albert.encoder.albert_layer_groups.0.albert_layers.0"
    assert sizes["albert.embeddings.word_embeddings.weight"] == (30_000, 128)
    assert sizes["albert.embeddings.position_embeddings.weight"] == (512, 128)
    assert sizes[f"{layer}.ffn.weight"] == (3072, 768)
    assert sizes["classifier.weight"] == (2, 768)
    assert len([name for name in sizes if name.endswith("ffn.weight")]) == 1
    assert sum(tensor.numel() for tensor in one.parameters()) == 11_685_122
    config = one.albert.config  # type: ignore[union-attr]
    assert (config.num_hidden_layers, config.num_attention_heads, config.hidden_act) == (12, 12, "gelu_new")
    assert (config.hidden_dropout_prob, config.classifier_dropout_prob) == (0, 0.1)


def test_padding_does_not_change_the_output() -> None:
    check_padding(net().eval(), tokens(24), length=8)


def test_vmap_over_weights_and_batches_equals_a_loop() -> None:
    check_vmap([net(seed=seed) for seed in (0, 1)], tokens(24))


def test_per_sample_scores_add_the_gradients_of_a_layer_that_is_applied_three_times() -> None:
    one = net(classifier_dropout=0.0).eval()
    batch = Batch(tokens(24), torch.arange(4) % 2, torch.arange(4))
    torch.testing.assert_close(squared_norms(MemberModule(one), batch), gradient_norms(one, batch), rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"shape": (3, 8, 8)}, "sequences of up to 12 tokens"), ({"shape": (13,)}, "positions"), ({"heads": 3}, "heads")],
)
def test_invalid_sizes_are_rejected(options: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        albert(**{"shape": (12,), "classes": 2, **SMALL, **options})


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a made-up corpus, GLUE's ids of dev pairs, and weights and tokenizer of a small ALBERT."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "MRPC").mkdir()
    lines = ["Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"]
    for row in range(24):
        one = [f"w{(row + k) % 16}" for k in range(3)]
        two = one if row % 2 else [f"w{(row + 7 + 3 * k) % 16}" for k in range(3)]
        lines.append(f"{row % 2}\t{row}\t{row + 100}\t{' '.join(one)}\t{' '.join(two)}")
    (folder / "MRPC" / "msr_paraphrase_train.txt").write_text("\n".join(lines), encoding="utf-8")
    ids = "\n".join(f"{row}\t{row + 100}" for row in range(0, 24, 3))
    (folder / "MRPC" / "dev_ids.tsv").write_text(ids, encoding="utf-8")
    (folder / "albert").mkdir()
    steps = [{"type": name} for name in ("Replace", "Replace", "NFKD", "StripAccents", "Lowercase")]
    vocabulary = [[piece, -float(number)] for number, piece in enumerate(PIECES)]
    tree = {"normalizer": {"normalizers": steps}, "model": {"type": "Unigram", "vocab": vocabulary}}
    (folder / "albert" / "tokenizer.json").write_text(json.dumps(tree), encoding="utf-8")
    base = {name: t for name, t in net(seed=3).state_dict().items() if not name.startswith("classifier.")}
    save_file(base | PUBLISHED_HEADS, folder / "albert" / "model.safetensors")
    return folder


def recipe(root: Path, method: str, **model: Any) -> Recipe:
    data = {"name": "mrpc", "root": str(root), "vocabulary": "albert/tokenizer.json", "test_split": "dev",
            "length": 12, "batch_size": 8}  # fmt: skip
    return Recipe.from_dict(
        {
            "members": 2,
            "data": data,
            "model": {
                "name": "albert", "weights": str(root / "albert" / "model.safetensors"), "strict": False, **SMALL,
                **model,
            },
            "method": {"name": method},
            "optimizer": {"name": "AdamW", "lr": 0.01},
            "train": {"epochs": 2},
            "executor": {"threads": 1},
        }
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore:Not loaded from")
def test_full_fine_tuning_trains_stores_and_loads_the_shared_layer_once(root: Path, tmp_path: Path) -> None:
    run = train(recipe(root, "sharpbalance"), tmp_path / "run")
    before = load_file(root / "albert" / "model.safetensors")
    for number in range(2):
        after = run.weights(number)
        assert set(after) == set(net().state_dict())
        assert len([name for name in after if "albert_layers" in name and name.endswith("query.weight")]) == 1
        moved = [name for name in after if name in before and not torch.equal(after[name], before[name])]
        assert set(moved) == {name for name in after if name in before}  # all of it is trained
    member: Any = plateaux.load_predictor(run).ensemble.members[0]
    (layer,) = [part for part in member.modules() if type(part).__name__ == "AlbertLayer"]
    with torch.no_grad():
        embedded = member.albert.embeddings(tokens(24)["input_ids"])
        hidden = member.albert.encoder.embedding_hidden_mapping_in(embedded)
        for _ in range(3):
            hidden = layer(hidden)
        assert torch.equal(member.albert.encoder(embedded)[0], hidden)
    assert (run.info.data.train.samples, run.info.data.test.samples) == (16, 8)
    predictor = plateaux.load_predictor(run)
    assert predictor([("w1 w2 w3", "w1 w2 w3"), ("W1s", "w5")]).probabilities.shape == (2, 2)


@pytest.mark.filterwarnings("ignore:Not loaded from")
def test_vmapped_members_equal_looped_ones(root: Path, tmp_path: Path) -> None:
    one = recipe(root, "sam", classifier_dropout=0.0).replaced(train={"precision": "fp64"})
    loop = weights(train(one, tmp_path / "loop"))
    stacked = weights(train(one.replaced(executor={"mode": "vmap"}), tmp_path / "vmap"))
    assert distance(stacked, loop) <= 1e-12


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Not loaded from")
def test_a_bundle_tokenizes_and_answers_as_the_run(root: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    run = train(recipe(root, "deep_ensemble").replaced(members=1, model={"depth": 2}), tmp_path / "run")
    plateaux.export(run, tmp_path / "bundle", license="CC0-1.0")
    pairs = [("w1 w2 w3", "w1 w2 w3"), ("W1s, w7", "w5 what")]
    ours, theirs = plateaux.load_predictor(run)(pairs), plateaux.load_predictor(tmp_path / "bundle")(pairs)
    torch.testing.assert_close(
        torch.from_numpy(ours.probabilities), torch.from_numpy(theirs.probabilities), rtol=0, atol=1e-5
    )


def test_missing_weights_are_reported_with_what_to_download(root: Path, tmp_path: Path) -> None:
    missing = recipe(root, "sam").replaced(model={"weights": "albert-base-v2/model.safetensors"})
    words = (
        r"no weights file at 'albert-base-v2/model.safetensors', in the current folder or below PLATEAUX_DATA: "
        r"download model.safetensors of https://huggingface.co/albert/albert-base-v2 to that path"
    )
    with pytest.raises(RecipeError, match=words):
        train(missing, tmp_path / "run")
