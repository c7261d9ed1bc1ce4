"""Files of tokenizers: a WordPiece vocabulary of BERT, or ALBERT's `tokenizer.json`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from plateaux.core.errors import DataError
from plateaux.data.files import try_read
from plateaux.data.preprocessing import SentencePiece, Tokenizer, WordPiece

STEPS = ("NFKD", "StripAccents", "Lowercase", "Precompiled")  # before ALBERT's pieces; quotes are replaced before them


def read_tokenizer(path: Path, length: int) -> Tokenizer:
    """Return the tokenizer of a file.

    It is a text file with one token per line, a safetensors file with `vocab` in its metadata, or a `tokenizer.json`.
    """
    if path.suffix == ".json":
        return _read_sentencepiece(path, length)
    return WordPiece(_read_vocabulary(path), length)


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


def _read_sentencepiece(path: Path, length: int) -> SentencePiece:
    """Read pieces, scores, and character map; the steps themselves are fixed, so others are refused."""
    tree = try_read(path, lambda file: json.loads(file.read_text(encoding="utf-8")))
    try:
        kind, vocabulary = tree["model"]["type"], tree["model"]["vocab"]
        steps = tree["normalizer"]["normalizers"]
        names = tuple(step["type"] for step in steps if step["type"] != "Replace")
        if kind != "Unigram" or names not in (STEPS, STEPS[:3]):
            raise DataError(
                f"{path} has a {kind} model after the steps {', '.join(names)}. Expected: the tokenizer.json of an "
                f"uncased ALBERT, a Unigram model after {', '.join(STEPS)}."
            )
        pieces, scores = zip(*((str(piece), float(score)) for piece, score in vocabulary), strict=True)
        charsmap = next((step["precompiled_charsmap"] for step in steps if step["type"] == "Precompiled"), "")
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from error
    if not isinstance(charsmap, str) or not all(map(math.isfinite, scores)):
        raise _damaged(path, "a score or the character map has another type")
    return SentencePiece(pieces, scores, length, charsmap)


def _damaged(path: Path, reason: Any) -> DataError:
    return DataError(f"{path} is not the tokenizer.json of an ALBERT ({reason}). Download it again.")
