"""MRPC: small generated files, and the real files if available."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from plateaux.core.errors import DataError, RecipeError
from plateaux.data.augment import Augment
from plateaux.data.datasets.mrpc import FILES, VOCABULARY, mrpc
from plateaux.data.loader import MemberLoader
from plateaux.data.sources import InMemorySource

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")

REAL = Path(os.environ.get("PLATEAUX_DATA", "")) / "MRPC"
TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "cat", "dog", "##s", "sat", "ran", ".", ","]
ROWS = [
    ("1", "The cats sat.", "The cat ran."),
    ("0", 'The "dog" sat, ran.', "cat"),
    ("1", "the the the the the the the the", "dog dog dog dog dog dog dog dog"),
]
HEADER = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"


def write_files(root: Path, rows: list[tuple[str, str, str]] = ROWS, *, vocabulary: list[str] = TOKENS) -> Path:
    (root / "MRPC").mkdir(parents=True, exist_ok=True)
    lines = [HEADER, *(f"{label}\t1\t2\t{one}\t{two}" for label, one, two in rows)]
    for name in FILES:
        (root / "MRPC" / name).write_text("\n".join(lines) + "\n", encoding="utf-8-sig")
    (root / "vocab.txt").write_text("\n".join(vocabulary) + "\n", encoding="utf-8")
    return root


def to_lists(source: object) -> dict[str, list[list[int]]]:
    assert isinstance(source, InMemorySource)
    assert not isinstance(source.x, Tensor)
    return {name: tensor.tolist() for name, tensor in source.x.items()}


def test_sentence_pairs_are_tokenized_into_three_inputs(tmp_path: Path) -> None:
    data = mrpc(root=str(write_files(tmp_path)), vocabulary="vocab.txt", length=12)
    assert (data.classes, data.shape, data.labels) == (2, (12,), ("different", "paraphrase"))
    inputs = to_lists(data.train)
    #                           [CLS] the cat ##s sat .  [SEP] the cat ran . [SEP]
    assert inputs["input_ids"][0] == [2, 4, 5, 7, 8, 10, 3, 4, 5, 9, 10, 3]
    assert inputs["token_type_ids"][0] == [0] * 7 + [1] * 5
    #                           [CLS] the "  dog "  sat ,  ran .  [SEP] cat [SEP]: unknown characters become [UNK]
    assert inputs["input_ids"][1] == [2, 4, 1, 6, 1, 8, 11, 9, 10, 3, 5, 3]
    assert data.train.fetch(torch.tensor([1, 0]))[1].tolist() == [0, 1]
    assert data.remarks == ("3 of 4,076 train pairs", "3 of 1,725 test pairs")


def test_short_pairs_are_padded_and_long_pairs_are_truncated(tmp_path: Path) -> None:
    truncated = to_lists(mrpc(root=str(write_files(tmp_path)), vocabulary="vocab.txt", length=11).train)
    assert truncated["input_ids"][2] == [2, 4, 4, 4, 4, 3, 6, 6, 6, 6, 3]
    padded = to_lists(mrpc(root=str(tmp_path), vocabulary="vocab.txt", length=20).train)
    assert padded["input_ids"][0][12:] == padded["attention_mask"][0][12:] == [0] * 8
    assert padded["attention_mask"][0][:12] == [1] * 12


def test_a_limit_selects_the_first_pairs(tmp_path: Path) -> None:
    data = mrpc(root=str(write_files(tmp_path)), vocabulary="vocab.txt", length=12, limit=2, test_limit=1)
    assert (len(data.train), len(data.test)) == (2, 1)


def test_the_vocabulary_can_be_read_from_safetensors_metadata(tmp_path: Path) -> None:
    file = write_files(tmp_path) / VOCABULARY
    file.parent.mkdir()
    save_file({"one": torch.zeros(1)}, file, {"vocab": "\n".join(TOKENS)})
    from_metadata = mrpc(root=str(tmp_path), length=12).train.fingerprint()
    assert from_metadata == mrpc(root=str(tmp_path), length=12, vocabulary="vocab.txt").train.fingerprint()
    save_file({"one": torch.zeros(1)}, file)
    with pytest.raises(DataError, match="no 'vocab'"):
        mrpc(root=str(tmp_path))
    file.write_bytes(b"not weights")
    with pytest.raises(DataError, match="cannot be read"):
        mrpc(root=str(tmp_path))


def test_missing_or_damaged_files_and_bad_options_are_reported(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"MRPC/msr_paraphrase_train\.txt"):
        mrpc(root=str(tmp_path))
    write_files(tmp_path, [("2", "a", "b")])
    with pytest.raises(DataError, match=r"train.txt, line 2 is not five tab-separated columns"):
        mrpc(root=str(tmp_path), vocabulary="vocab.txt")
    write_files(tmp_path, vocabulary=["cat"])
    with pytest.raises(DataError, match=r"has no \[PAD\]"):
        mrpc(root=str(tmp_path), vocabulary="vocab.txt")
    with pytest.raises(DataError, match="vocabulary of mrpc"):
        mrpc(root=str(tmp_path), vocabulary="other.txt")
    with pytest.raises(RecipeError, match="at least 8"):
        mrpc(root=str(tmp_path), length=3)


def test_dict_inputs_pass_through_the_loader_and_cannot_be_augmented(tmp_path: Path) -> None:
    data = mrpc(root=str(write_files(tmp_path)), vocabulary="vocab.txt", length=12)
    batches = list(MemberLoader(data.train, torch.arange(3), batch_size=2, seed=1, classes=2).epoch(0))
    for batch in batches:
        inputs, labels = data.train.fetch(batch.index)
        assert not isinstance(batch.x, Tensor)
        assert not isinstance(inputs, Tensor)
        assert all(torch.equal(batch.x[name], inputs[name]) for name in inputs)
        assert torch.equal(batch.y, labels)
    augmented = MemberLoader(data.train, torch.arange(3), batch_size=2, seed=1, classes=2, augment=Augment(crop=1))
    with pytest.raises(RecipeError, match="needs images"):
        next(augmented.epoch(0))


@pytest.mark.skipif(not REAL.is_dir(), reason="PLATEAUX_DATA has no MRPC")
def test_the_real_corpus_has_its_published_counts_and_no_unknown_token() -> None:
    data = mrpc(length=80)
    assert (len(data.train), len(data.test), data.remarks) == (4076, 1725, ())
    x, y = data.test.fetch(torch.arange(1725))
    assert not isinstance(x, Tensor)
    assert int(y.sum()) == 1147  # paraphrases, as published
    assert int((x["input_ids"] == 1).sum()) == 0
