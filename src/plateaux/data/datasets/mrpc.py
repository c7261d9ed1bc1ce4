"""MRPC, the Microsoft Research Paraphrase Corpus of sentence pairs (Dolan and Brockett 2005)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

import torch

from plateaux.core.errors import DataError, RecipeError
from plateaux.core.ranges import Count
from plateaux.core.registry import dataset
from plateaux.data.files import data_root, limited_count, missing_data_error, read_lines, try_read
from plateaux.data.preprocessing import Preprocessing, Tokenizer
from plateaux.data.sources import DataSplits, InMemorySource
from plateaux.data.tokenizer_files import read_tokenizer

FILES = ("msr_paraphrase_train.txt", "msr_paraphrase_test.txt")
GLUE_FILES = ("train.tsv", "dev.tsv")
DEV_IDS = (
    "dev_ids.tsv",
    "mrpc_dev_ids.tsv",
)  # of the pairs of GLUE's dev split, which are training pairs of the corpus
FOLDERS = ("MRPC", "mrpc", ".")
VOCABULARY = "weights/minilm_l3_mrpc_fp16.safetensors"
PUBLISHED = {"test": {"train": 4_076, "test": 1_725}, "dev": {"train": 3_668, "dev": 408}}
PAGE = "https://www.microsoft.com/en-us/download/details.aspx?id=52398"
GLUE_PAGE = "https://gluebenchmark.com/tasks"
MIN_LENGTH = 8  # tokens: three special tokens, and some of each sentence


class SentencePair(NamedTuple):
    """Two sentences, their ids in the corpus, and whether one paraphrases the other."""

    label: int
    ids: tuple[str, str]
    sentences: tuple[str, str]


@dataset
def mrpc(
    *,
    length: Count = 80,
    vocabulary: str = VOCABULARY,
    test_split: Literal["test", "dev"] = "test",
    root: str | None = None,
    limit: Count | None = None,
    test_limit: Count | None = None,
) -> DataSplits:
    """MRPC: 4,076 + 1,725 sentence pairs from newspapers, labeled as paraphrases or not.

    With `test_split = "dev"`, the test samples are GLUE's dev split: 3,668 + 408 of the 4,076 pairs. A sample has three
    rows of `length` integers, `input_ids`, `attention_mask`, and `token_type_ids`: both sentences in lower case and in
    pieces of words, the longer truncated first. The vocabulary is looked up under the data root: a text file with one
    WordPiece token per line, a safetensors file with `vocab` in its metadata, or the `tokenizer.json` of an ALBERT. At
    80 tokens, 2 % of the pairs are truncated.
    """
    if length < MIN_LENGTH:
        raise RecipeError(f"mrpc has length = {length}. Two sentences need at least {MIN_LENGTH} tokens.")
    base = data_root(root)
    train, test = _read_dev_split(base) if test_split == "dev" else _read_corpus(base)
    published = PUBLISHED[test_split]
    counts = dict(zip(published, (len(train), len(test)), strict=True))
    tokenizer = read_tokenizer(_find_vocabulary(base, vocabulary), length)
    return DataSplits(
        "mrpc",
        train=_build_source(tokenizer, train, limit),
        test=_build_source(tokenizer, test, test_limit),
        classes=2,
        shape=(length,),
        labels=("different", "paraphrase"),
        remarks=tuple(f"{n:,} of {published[s]:,} {s} pairs" for s, n in counts.items() if n != published[s]),
        preprocessing=Preprocessing(tokenizer=tokenizer),
    )


def _read_corpus(base: Path) -> tuple[list[SentencePair], list[SentencePair]]:
    folder = _find_folder(base, FILES[0])
    if folder is None:
        raise missing_data_error("mrpc", expected=f"MRPC/{FILES[0]} and MRPC/{FILES[1]}", folder=base, url=PAGE)
    return _read_pairs(folder / FILES[0]), _read_pairs(folder / FILES[1])


def _read_dev_split(base: Path) -> tuple[list[SentencePair], list[SentencePair]]:
    """Return GLUE's train and dev split, from its own files or from the corpus and the ids of the dev pairs."""
    folder = _find_folder(base, *GLUE_FILES)
    if folder is not None:
        return _read_pairs(folder / GLUE_FILES[0]), _read_pairs(folder / GLUE_FILES[1])
    for name in DEV_IDS:
        folder = _find_folder(base, FILES[0], name)
        if folder is not None:
            return _split_by_ids(_read_pairs(folder / FILES[0]), folder / name)
    raise missing_data_error(
        "The dev split of mrpc",
        expected=f"MRPC/{GLUE_FILES[0]} and MRPC/{GLUE_FILES[1]}, or MRPC/{FILES[0]} and MRPC/{DEV_IDS[0]},",
        folder=base,
        url=GLUE_PAGE,
    )


def _find_folder(base: Path, *files: str) -> Path | None:
    return next((base / name for name in FOLDERS if all((base / name / file).is_file() for file in files)), None)


def _split_by_ids(pairs: list[SentencePair], path: Path) -> tuple[list[SentencePair], list[SentencePair]]:
    """Return the pairs whose ids are not in a file, and those that are."""
    ids = {tuple(line.split("\t")) for line in try_read(path, read_lines)}
    unknown = ids - {pair.ids for pair in pairs}
    if unknown:
        raise DataError(
            f"{path} lists {len(unknown):,} of {len(ids):,} pairs that are not in {FILES[0]}, such as "
            f"{' and '.join(sorted(unknown)[0])}. Each line has the two ids of a pair; download it again."
        )
    return [pair for pair in pairs if pair.ids not in ids], [pair for pair in pairs if pair.ids in ids]


def _read_pairs(path: Path) -> list[SentencePair]:
    """Read sentence pairs; a line has five tab-separated columns: label, two ids, and two sentences."""
    text = try_read(path, lambda file: file.read_text(encoding="utf-8-sig"))
    rows = [line.split("\t") for line in text.splitlines()[1:] if line]
    bad_line = next((number for number, row in enumerate(rows, 2) if len(row) != 5 or row[0] not in ("0", "1")), None)
    if bad_line is not None or not rows:
        raise DataError(
            f"{path}, line {bad_line or 2} is not five tab-separated columns with a first column of 0 or 1. "
            "Download it again."
        )
    return [SentencePair(int(row[0]), (row[1], row[2]), (row[3], row[4])) for row in rows]


def _find_vocabulary(base: Path, name: str) -> Path:
    path = next((path for path in (base / name, Path(name).expanduser()) if path.is_file()), None)
    if path is None:
        source = "the source of the model's weights"
        source += ", such as https://huggingface.co/albert/albert-base-v2," if name.endswith(".json") else ""
        raise missing_data_error("The vocabulary of mrpc", expected=name, folder=base, url=source)
    return path


def _build_source(tokenizer: Tokenizer, pairs: list[SentencePair], limit: int | None) -> InMemorySource:
    pairs = pairs[: limited_count(len(pairs), limit)]
    encoded = tokenizer.encode([pair.sentences for pair in pairs])
    y = torch.tensor([pair.label for pair in pairs])
    return InMemorySource({name: torch.from_numpy(values) for name, values in encoded.items()}, y)
