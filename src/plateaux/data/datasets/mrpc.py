"""Pairs of sentences and whether they say the same: the paraphrase corpus of Dolan and Brockett 2005."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from plateaux.core.errors import DataError, RecipeError
from plateaux.core.optional import optional_import
from plateaux.core.registry import dataset
from plateaux.data.files import data_root, limited_count, missing_data_error, try_read
from plateaux.data.sources import DataSplits, InMemorySource

FILES = ("msr_paraphrase_train.txt", "msr_paraphrase_test.txt")
VOCABULARY = "weights/minilm_l3_mrpc_fp16.safetensors"
PUBLISHED = {"train": 4_076, "test": 1_725}
GET = "https://www.microsoft.com/en-us/download/details.aspx?id=52398"
LEAST = 8  # tokens: three that mark and separate, and something of each sentence

Pair = tuple[str, str]


@dataset
def mrpc(
    *,
    length: int = 80,
    vocabulary: str = VOCABULARY,
    root: str | None = None,
    limit: int | None = None,
    test_limit: int | None = None,
) -> DataSplits:
    """MRPC: 4,076 + 1,725 pairs of sentences from the news, and whether they say the same.

    A sample is three rows of `length` numbers, `input_ids`, `attention_mask` and `token_type_ids`: both sentences in
    lower case and WordPiece, the longer cut first. The vocabulary is a text file of one token a line, or a safetensors
    file with `vocab` in its metadata, looked for under the data's root. At 80 tokens two pairs in a hundred are cut.
    """
    if length < LEAST:
        raise RecipeError(f"mrpc with length = {length}: two sentences and their marks take at least {LEAST} tokens")
    base = data_root(root)
    folder = next((base / name for name in ("MRPC", "mrpc", ".") if (base / name / FILES[0]).is_file()), None)
    if folder is None:
        raise missing_data_error("mrpc", wanted=f"MRPC/{FILES[0]} and MRPC/{FILES[1]}", where=base, get=GET)
    (pairs, y), (test_pairs, test_y) = (_read(folder / name) for name in FILES)
    counts = {"train": len(y), "test": len(test_y)}
    tokens = _tokenizer(_vocabulary(_found(base, vocabulary)))
    return DataSplits(
        "mrpc",
        train=_source(tokens, pairs, y, length, limit),
        test=_source(tokens, test_pairs, test_y, length, test_limit),
        classes=2,
        shape=(length,),
        labels=("different", "paraphrase"),
        remarks=tuple(f"{n:,} of {PUBLISHED[s]:,} {s} pairs" for s, n in counts.items() if n != PUBLISHED[s]),
    )


def _read(path: Path) -> tuple[list[Pair], Tensor]:
    """Return the pairs of a file and their labels; a line is label, two ids and two sentences between tabs."""
    text = try_read(path, lambda file: file.read_text(encoding="utf-8-sig"))
    lines = [line.split("\t") for line in text.splitlines()[1:] if line]
    wrong = next((number for number, line in enumerate(lines, 2) if len(line) != 5 or line[0] not in ("0", "1")), None)
    if wrong is not None or not lines:
        raise DataError(
            f"{path}, line {wrong or 2}: five columns between tabs, the first 0 or 1, are needed; get it again."
        )
    return [(line[3], line[4]) for line in lines], torch.tensor([int(line[0]) for line in lines])


def _found(base: Path, name: str) -> Path:
    path = next((path for path in (base / name, Path(name).expanduser()) if path.is_file()), None)
    if path is None:
        raise missing_data_error(
            "The vocabulary of mrpc", wanted=name, where=base, get="where the model's weights are from"
        )
    return path


def _vocabulary(path: Path) -> list[str]:
    """Return the tokens in the order of their numbers."""
    if path.suffix != ".safetensors":
        lines: list[str] = try_read(path, lambda file: file.read_text(encoding="utf-8").split("\n"))
        return lines[:-1] if lines[-1] == "" else lines
    try:
        with safe_open(path, framework="pt") as opened:
            text: str | None = (opened.metadata() or {}).get("vocab")
    except SafetensorError as error:
        raise DataError(f"{path} cannot be read ({error}); it is damaged or incomplete: get it again.") from error
    if text is None:
        raise DataError(f"{path} has no 'vocab' in its metadata; give a file of one token a line: data.vocabulary")
    return text.split("\n")


def _tokenizer(vocabulary: list[str]) -> Any:
    lacking = [mark for mark in ("[PAD]", "[UNK]", "[CLS]", "[SEP]") if mark not in vocabulary]
    if lacking:
        raise DataError(f"The vocabulary of {len(vocabulary)} tokens lacks {', '.join(lacking)}; it is no BERT's.")
    numbers = {token: number for number, token in enumerate(vocabulary)}
    return optional_import("transformers", extra="text").BertTokenizer(vocab=numbers, do_lower_case=True)


def _source(tokens: Any, pairs: list[Pair], y: Tensor, length: int, limit: int | None) -> InMemorySource:
    count = limited_count(len(pairs), limit)
    first, second = ([pair[side] for pair in pairs[:count]] for side in (0, 1))
    made = tokens(
        first, second, padding="max_length", truncation="longest_first", max_length=length, return_tensors="pt"
    )
    return InMemorySource(
        {name: made[name] for name in ("input_ids", "attention_mask", "token_type_ids")}, y[:count].clone()
    )
