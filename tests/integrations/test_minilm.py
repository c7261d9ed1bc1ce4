"""The text encoder: compared with transformers, with padding, vmap, adapters, and full runs."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import distance, weights
from laws.test_interrupted import train_with_interruption
from reference.gradient_norms import gradient_norms
from safetensors import safe_open
from safetensors.torch import save_file
from token_networks import check_padding, check_vmap, tokens
from torch import Tensor, nn
from typer.testing import CliRunner

from plateaux.cli.main import app
from plateaux.config.recipe import Recipe
from plateaux.core.errors import RecipeError
from plateaux.core.imports import optional_import
from plateaux.core.member import MemberModule
from plateaux.core.types import Batch
from plateaux.integrations.text_models import minilm
from plateaux.models.lora import LoRALinear, add_lora, merge_lora
from plateaux.optim.grad_norms import squared_norms
from plateaux.training.train import train

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")

REAL = Path(os.environ.get("PLATEAUX_DATA", "")) / "weights" / "minilm_l3_mrpc_fp16.safetensors"
SMALL: dict[str, Any] = {"vocabulary": 20, "width": 16, "depth": 2, "heads": 2, "hidden": 24, "positions": 12}


def net(*, seed: int = 0, **options: Any) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return minilm(shape=(12,), classes=2, **{**SMALL, **options})


def test_its_tokens_equal_those_of_transformers() -> None:
    one = net(pool="mean").eval()
    library = optional_import("transformers", extra="text")
    config = library.BertConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=12,
    )  # fmt: skip
    bert = library.BertModel(config, add_pooling_layer=False).eval()
    bert.load_state_dict({n: t for n, t in one.state_dict().items() if not n.startswith("head.")}, strict=True)
    x = tokens(20)
    with torch.no_grad():
        hidden, mask = bert(**x).last_hidden_state, x["attention_mask"]
        pooled = torch.stack([hidden[row][mask[row] == 1].mean(0) for row in range(4)])
        torch.testing.assert_close(one(**x), one.head(pooled), rtol=0, atol=1e-5)  # type: ignore[operator]


def test_a_pair_is_encoded_by_the_difference_and_product_of_its_means() -> None:
    one, x = net().eval(), tokens(20)
    activations: list[Tensor] = []
    one.encoder.register_forward_hook(lambda _, __, out: activations.append(out[0]))  # type: ignore[union-attr]
    with torch.no_grad():
        out = one(**x)
    hidden = activations[0]
    for row in range(4):
        end = int(x["attention_mask"][row].sum())
        u, v = hidden[row, :4].mean(0), hidden[row, 4:end].mean(0)
        by_hand = one.head(torch.cat([(u - v).abs(), u * v]))  # type: ignore[operator]
        torch.testing.assert_close(out[row], by_hand, rtol=0, atol=1e-5)


@pytest.mark.parametrize("pool", ["pair", "mean"])
def test_padding_does_not_change_the_output(pool: str) -> None:
    check_padding(net(pool=pool).eval(), tokens(20), length=8)


def test_vmap_over_weights_and_batches_equals_a_loop() -> None:
    check_vmap([net(seed=seed) for seed in (0, 1)], tokens(20))


def test_adapters_start_at_the_base_merge_into_it_and_support_per_sample_scores() -> None:
    one, x = net().eval(), tokens(20)
    start = one(**x)
    add_lora(one, rank=4, alpha=8.0, target_modules=["*.query", "*.value"])
    assert torch.equal(one(**x), start)
    adapters = [part for part in one.modules() if isinstance(part, LoRALinear)]
    assert len(adapters) == 4
    for part in adapters:
        nn.init.normal_(part.up.weight, std=0.3)
    plain = net(seed=5).eval()
    plain.load_state_dict(merge_lora(one), strict=True)
    torch.testing.assert_close(plain(**x), one(**x), rtol=0, atol=1e-6)
    batch = Batch(x, torch.arange(4) % 2, torch.arange(4))
    torch.testing.assert_close(squared_norms(MemberModule(one), batch), gradient_norms(one, batch), rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"shape": (3, 8, 8)}, "sequences of up to 12 tokens"), ({"shape": (13,)}, "positions"), ({"heads": 3}, "heads")],
)
def test_invalid_sizes_are_rejected(options: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        minilm(**{"shape": (12,), "classes": 2, **SMALL, **options})


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a made-up corpus, its vocabulary and the weights of a base, all under one roof."""
    root = tmp_path_factory.mktemp("corpus")
    (root / "MRPC").mkdir()
    words = [f"w{number}" for number in range(16)]
    for split, count in (("train", 20), ("test", 8)):
        lines = ["Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"]
        for row in range(count):
            one = [words[(row + k) % 16] for k in range(4)]
            two = one if row % 2 else [words[(row + 7 + 3 * k) % 16] for k in range(4)]
            lines.append(f"{row % 2}\t1\t2\t{' '.join(one)}\t{' '.join(two)}")
        (root / "MRPC" / f"msr_paraphrase_{split}.txt").write_text("\n".join(lines), encoding="utf-8")
    marks = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    base = {name: t for name, t in net(seed=3).state_dict().items() if not name.startswith("head.")}
    save_file(base, root / "base.safetensors", {"vocab": "\n".join([*marks, *words])})
    return root


def row_of(root: Path, method: str) -> Recipe:
    return Recipe.from_dict(
        {
            "members": 2,
            "data": {"name": "mrpc", "root": str(root), "vocabulary": "base.safetensors", "length": 12,
            "batch_size": 8},
            "model": {
                "name": "minilm", "weights": str(root / "base.safetensors"), "strict": False, **SMALL,
                "lora": {"rank": 2, "target_modules": ["*.query", "*.value"]},
            },
            "method": {"name": method},
            "optimizer": {"name": "AdamW", "lr": 0.01},
            "train": {"epochs": 2},
            "executor": {"threads": 1},
        }
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore:Not loaded from")
def test_a_text_ensemble_trains_resumes_and_is_evaluated_from_the_command_line(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLATEAUX_DATA", str(corpus))
    row = row_of(corpus, "sharpbalance").replaced(model={"weights": "base.safetensors"})
    (tmp_path / "text.toml").write_text(row.to_toml(), encoding="utf-8")
    call = ["train", str(tmp_path / "text.toml"), "--out", str(tmp_path / "whole"), "--json"]
    assert CliRunner().invoke(app, call).exit_code == 0
    parts = train_with_interruption(row, tmp_path / "parts", 4)
    from plateaux.storage.run import Run

    whole = Run.open(tmp_path / "whole")
    assert distance(weights(parts), weights(whole)) == 0
    with safe_open(corpus / "base.safetensors", "pt") as file:
        assert set(file.keys()) == set(whole.shared())
        assert all(torch.equal(file.get_tensor(name), tensor) for name, tensor in whole.shared().items())
    asked = ["evaluate", str(tmp_path / "whole"), "--metrics", "accuracy,binary_f1", "--json"]
    message = CliRunner().invoke(app, asked)
    assert {each["metric"] for each in json.loads(message.stdout)} == {"accuracy", "binary_f1"}
    answers = CliRunner().invoke(
        app, ["predict", str(tmp_path / "whole"), "--split", "test", "-o", str(tmp_path / "out.csv")]
    )
    assert answers.exit_code == 0, answers.output


@pytest.mark.filterwarnings("ignore:Not loaded from")
def test_vmapped_text_members_equal_looped_ones(corpus: Path, tmp_path: Path) -> None:
    row = row_of(corpus, "sam").replaced(train={"precision": "fp64"})
    loop = weights(train(row, tmp_path / "loop"))
    stacked = weights(train(row.replaced(executor={"mode": "vmap"}), tmp_path / "vmap"))
    assert distance(stacked, loop) <= 1e-12


@pytest.mark.skipif(not REAL.is_file(), reason="the weights of MiniLM are not here: set PLATEAUX_DATA")
def test_the_published_weights_load_and_separate_paraphrases() -> None:
    from plateaux.data.datasets.mrpc import mrpc
    from plateaux.models.surgery import load_weights

    data = mrpc(length=64, limit=1, test_limit=96)
    one = minilm(shape=(64,), classes=2).eval()
    with pytest.warns(UserWarning, match="Not loaded"):
        load_weights(one, REAL, strict=False)
    activations: list[Tensor] = []
    one.head.register_forward_hook(lambda _, args, __: activations.append(args[0]))  # type: ignore[union-attr]
    x, y = data.test.fetch(torch.arange(96))
    assert not isinstance(x, Tensor)
    with torch.no_grad():
        one(**x)
    far = activations[0][:, :384].norm(dim=1)  # |u - v|
    pairs = far[y == 0][:, None] - far[y == 1][None]
    assert float((pairs > 0).double().mean()) > 0.6  # 0.5 is random
