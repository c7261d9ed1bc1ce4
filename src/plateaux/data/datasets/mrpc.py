"""MRPC, the Microsoft Research Paraphrase Corpus of sentence pairs (Dolan and Brockett 2005)."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from plateaux.core.errors import DataError, RecipeError
from plateaux.core.ranges import Count
from plateaux.core.registry import dataset
from plateaux.data.files import data_root, limited_count, missing_data_error, try_read
from plateaux.data.preprocessing import Preprocessing, WordPiece
from plateaux.data.sources import DataSplits, InMemorySource

FILES = ("msr_paraphrase_train.txt", "msr_paraphrase_test.txt")
VOCABULARY = "weights/minilm_l3_mrpc_fp16.safetensors"
PUBLISHED = {"train": 4_076, "test": 1_725}
PAGE = "https://www.microsoft.com/en-us/download/details.aspx?id=52398"
MIN_LENGTH = 8  # tokens: three special tokens, and some of each sentence

Pair = tuple[str, str]


@dataset
def mrpc(
    *,
    length: Count = 80,
    vocabulary: str = VOCABULARY,
    root: str | None = None,
    limit: Count | None = None,
    test_limit: Count | None = None,
) -> DataSplits:
    """MRPC: 4,076 + 1,725 sentence pairs from newspapers, labeled as paraphrases or not.

    A sample has three rows of `length` integers, `input_ids`, `attention_mask`, and `token_type_ids`: both sentences in
    lower case and WordPiece, the longer truncated first. The vocabulary is a text file with one token per line, or a
    safetensors file with `vocab` in its metadata, looked up under the data root. At 80 tokens, 2 % of the pairs are
    truncated.
    """
    if length < MIN_LENGTH:
        raise RecipeError(f"mrpc has length = {length}. Two sentences need at least {MIN_LENGTH} tokens.")
    base = data_root(root)
    folder = next((base / name for name in ("MRPC", "mrpc", ".") if (base / name / FILES[0]).is_file()), None)
    if folder is None:
        raise missing_data_error("mrpc", expected=f"MRPC/{FILES[0]} and MRPC/{FILES[1]}", folder=base, url=PAGE)
    (pairs, y), (test_pairs, test_y) = (_read_pairs(folder / name) for name in FILES)
    counts = {"train": len(y), "test": len(test_y)}
    tokenizer = WordPiece(_read_vocabulary(_find_vocabulary(base, vocabulary)), length)
    return DataSplits(
        "mrpc",
        train=_build_source(tokenizer, pairs, y, limit),
        test=_build_source(tokenizer, test_pairs, test_y, test_limit),
        classes=2,
        shape=(length,),
        labels=("different", "paraphrase"),
        remarks=tuple(f"{n:,} of {PUBLISHED[s]:,} {s} pairs" for s, n in counts.items() if n != PUBLISHED[s]),
        preprocessing=Preprocessing(tokenizer=tokenizer),
    )


def _read_pairs(path: Path) -> tuple[list[Pair], Tensor]:
    """Read sentence pairs and labels; a line has five tab-separated columns: label, two ids, and two sentences."""
    text = try_read(path, lambda file: file.read_text(encoding="utf-8-sig"))
    rows = [line.split("\t") for line in text.splitlines()[1:] if line]
    bad_line = next((number for number, row in enumerate(rows, 2) if len(row) != 5 or row[0] not in ("0", "1")), None)
    if bad_line is not None or not rows:
        raise DataError(
            f"{path}, line {bad_line or 2} is not five tab-separated columns with a first column of 0 or 1. "
            "Download it again."
        )
    return [(row[3], row[4]) for row in rows], torch.tensor([int(row[0]) for row in rows])


def _find_vocabulary(base: Path, name: str) -> Path:
    path = next((path for path in (base / name, Path(name).expanduser()) if path.is_file()), None)
    if path is None:
        raise missing_data_error(
            "The vocabulary of mrpc", expected=name, folder=base, url="the source of the model's weights"
        )
    return path


def _read_vocabulary(path: Path) -> str:
    """Return the tokens in the order of their ids, one per line."""
    if path.suffix != ".safetensors":
        lines: str = try_read(path, lambda file: file.read_text(encoding="utf-8"))
        return lines.removesuffix("\n")
    try:
        with safe_open(path, framework="pt") as file:
            text: str | None = (file.metadata() or {}).get("vocab")
    except SafetensorError as error:
        raise DataError(f"{path} cannot be read ({error}). It is damaged or incomplete; download it again.") from error
    if text is None:
        raise DataError(
            f"{path} has no 'vocab' in its metadata. Set data.vocabulary to a text file with one token per line."
        )
    return text


def _build_source(tokenizer: WordPiece, pairs: list[Pair], y: Tensor, limit: int | None) -> InMemorySource:
    count = limited_count(len(pairs), limit)
    encoded = tokenizer.encode(pairs[:count])
    return InMemorySource({name: torch.from_numpy(values) for name, values in encoded.items()}, y[:count].clone())
