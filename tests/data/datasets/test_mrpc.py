"""MRPC: small generated files, and the real files if available."""

from __future__ import annotations

import json
import os
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from plateaux.core.errors import DataError, RecipeError
from plateaux.data.augment import Augment
from plateaux.data.datasets.mrpc import DEV_IDS, FILES, VOCABULARY, mrpc
from plateaux.data.loader import MemberLoader
from plateaux.data.preprocessing import SentencePiece
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


def write_glue(root: Path, *, count: int = 6) -> Path:
    """Write a training file with ids that differ, and the vocabulary; pairs 1 and 4 have the labels of dev pairs."""
    write_files(root)
    lines = [HEADER, *(f"{row % 2}\t{row}\t{10 * row}\tcat\tdog" for row in range(count))]
    (root / "MRPC" / FILES[0]).write_text("\n".join(lines) + "\n", encoding="utf-8-sig")
    return root


def write_tokenizer(path: Path, *, kind: str = "Unigram", steps: str = "NFKD StripAccents Lowercase") -> None:
    pieces = ["<pad>", "<unk>", "[CLS]", "[SEP]", "▁the", "▁cat", "▁dog", "s", "▁"]
    tree = {
        "normalizer": {"type": "Sequence", "normalizers": [{"type": name} for name in f"Replace {steps}".split()]},
        "model": {"type": kind, "unk_id": 1, "vocab": [[piece, -float(id_)] for id_, piece in enumerate(pieces)]},
    }
    path.write_text(json.dumps(tree), encoding="utf-8")


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


@pytest.mark.parametrize("file", DEV_IDS)
def test_the_dev_split_is_separated_by_its_ids(file: str, tmp_path: Path) -> None:
    (write_glue(tmp_path) / "MRPC" / file).write_text("4\t40\n1\t10\n", encoding="utf-8")
    data = mrpc(root=str(tmp_path), vocabulary="vocab.txt", length=12, test_split="dev")
    train, dev = (source.fetch(torch.arange(len(source)))[1].tolist() for source in (data.train, data.test))
    assert (train, dev) == ([0, 0, 1, 1], [1, 0])  # pairs 0, 2, 3, 5, and 1, 4, in the order of the file
    assert data.remarks == ("4 of 3,668 train pairs", "2 of 408 dev pairs")
    assert mrpc(root=str(tmp_path), vocabulary="vocab.txt", length=12).train.fetch(torch.arange(6))[1].tolist() == (
        [0, 1] * 3
    )


def test_the_files_of_glue_are_read(tmp_path: Path) -> None:
    folder = write_glue(tmp_path) / "MRPC"
    for name, rows in (("train.tsv", ROWS), ("dev.tsv", ROWS[:1])):
        lines = [HEADER, *(f"{label}\t1\t2\t{one}\t{two}" for label, one, two in rows)]
        (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8-sig")
    data = mrpc(root=str(tmp_path), vocabulary="vocab.txt", length=12, test_split="dev")
    assert (len(data.train), len(data.test)) == (3, 1)
    assert to_lists(data.test)["input_ids"] == to_lists(data.train)["input_ids"][:1]


def test_a_missing_or_wrong_dev_split_is_reported(tmp_path: Path) -> None:
    write_glue(tmp_path)
    words = r"The dev split of mrpc was not found: looked for MRPC/train\.tsv and MRPC/dev\.tsv, or .*/dev_ids\.tsv,"
    with pytest.raises(DataError, match=words):
        mrpc(root=str(tmp_path), vocabulary="vocab.txt", test_split="dev")
    (tmp_path / "MRPC" / DEV_IDS[0]).write_text("1\t10\n2\t21\n", encoding="utf-8")
    with pytest.raises(
        DataError, match=r"lists 1 of 2 pairs that are not in msr_paraphrase_train\.txt, such as 2 and 21"
    ):
        mrpc(root=str(tmp_path), vocabulary="vocab.txt", test_split="dev")


def test_the_tokenizer_of_an_albert_is_read(tmp_path: Path) -> None:
    write_tokenizer(write_files(tmp_path) / "tokenizer.json")
    data = mrpc(root=str(tmp_path), vocabulary="tokenizer.json", length=13)
    tokenizer = data.preprocessing.tokenizer
    assert isinstance(tokenizer, SentencePiece)
    assert (tokenizer.pieces[4], tokenizer.scores[4], tokenizer.tokens()) == ("▁the", -4.0, 9)
    #                  [CLS] the cat s  ▁  s  at. [SEP] the cat ▁ ran. [SEP]
    assert to_lists(data.train)["input_ids"][0] == [2, 4, 5, 7, 8, 7, 1, 3, 4, 5, 8, 1, 3]
    assert to_lists(data.train)["token_type_ids"][0] == [0] * 8 + [1] * 5


def test_other_tokenizers_are_refused(tmp_path: Path) -> None:
    file = write_files(tmp_path) / "tokenizer.json"
    for options, words in (
        ({"kind": "BPE"}, "a BPE model after the steps NFKD, StripAccents, Lowercase. Expected: the tokenizer.json of"),
        ({"steps": "NFKD"}, "a Unigram model after the steps NFKD. Expected"),
    ):
        write_tokenizer(file, **options)  # type: ignore[arg-type]
        with pytest.raises(DataError, match=words):
            mrpc(root=str(tmp_path), vocabulary="tokenizer.json")
    for text in (
        "{}",
        "[]",
        "no JSON",
        '{"model": {"type": "Unigram", "vocab": 3}, "normalizer": {"normalizers": []}}',
    ):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(DataError, match=r"tokenizer\.json"):
            mrpc(root=str(tmp_path), vocabulary="tokenizer.json")
    with pytest.raises(
        DataError, match=r"albert-base-v2/tokenizer\.json in .* https://huggingface\.co/albert/albert-base"
    ):
        mrpc(root=str(tmp_path), vocabulary="albert-base-v2/tokenizer.json")


@pytest.mark.slow
@pytest.mark.skipif(not REAL.is_dir(), reason="PLATEAUX_DATA has no MRPC")
def test_408_ids_of_the_real_corpus_leave_the_published_number_of_training_pairs(tmp_path: Path) -> None:
    """The ids of GLUE are not here; its split has 3,668 and 408 pairs only if every pair of ids occurs once."""
    (tmp_path / "MRPC").mkdir()
    shutil.copy(REAL / FILES[0], tmp_path / "MRPC")
    rows = [line.split("\t") for line in (REAL / FILES[0]).read_text(encoding="utf-8-sig").splitlines()[1:]]
    labels = {(row[1], row[2]): int(row[0]) for row in rows}
    assert len(labels) == 4076
    # The first five rows of GLUE's dev.tsv, and their labels.
    published = {("1355540", "1355592"): 1, ("2029631", "2029565"): 0, ("487993", "487952"): 0,
                 ("1989515", "1989458"): 1, ("1783137", "1782659"): 0}  # fmt: skip
    assert {pair: labels[pair] for pair in published} == published
    others = [pair for pair in labels if pair not in published][:403]
    ids = "\n".join("\t".join(pair) for pair in [*published, *others])
    (tmp_path / "MRPC" / "dev_ids.tsv").write_text(ids, encoding="utf-8")
    (tmp_path / "vocab.txt").write_text("\n".join(TOKENS), encoding="utf-8")
    data = mrpc(root=str(tmp_path), vocabulary="vocab.txt", length=8, test_split="dev")
    assert (len(data.train), len(data.test), data.remarks) == (3668, 408, ())


@pytest.mark.skipif(not REAL.is_dir(), reason="PLATEAUX_DATA has no MRPC")
def test_the_real_corpus_has_its_published_counts_and_no_unknown_token() -> None:
    data = mrpc(length=80)
    assert (len(data.train), len(data.test), data.remarks) == (4076, 1725, ())
    x, y = data.test.fetch(torch.arange(1725))
    assert not isinstance(x, Tensor)
    assert int(y.sum()) == 1147  # paraphrases, as published
    assert int((x["input_ids"] == 1).sum()) == 0
