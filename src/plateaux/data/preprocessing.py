"""How raw inputs became the samples of a data set: size of images, tokenizer of texts, columns of tables. In the run.

Importing this module needs neither torch nor NumPy, because `plateaux status` reads run folders with it.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from plateaux.core.errors import DataError, first_line
from plateaux.core.imports import optional_import
from plateaux.core.ranges import Finite, StoredCount

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PAD, UNK, CLS, SEP = SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
ALBERT_PAD, ALBERT_UNK = "<pad>", "<unk>"
BERT_INPUTS = ("input_ids", "attention_mask", "token_type_ids")
Resample = Literal["nearest", "lanczos", "bilinear", "bicubic", "box", "hamming"]  # of Pillow
ATTRIBUTES = ("ids", "attention_mask", "type_ids")  # of an encoding, in the order of the outputs of BERT


@dataclass(frozen=True, slots=True)
class WordPiece:
    """BERT's tokenizer: lower case, punctuation split off, words divided into the longest known pieces."""

    vocabulary: str  # one token per line, in the order of their ids
    length: StoredCount  # of the padded or truncated sequences
    texts: tuple[str, ...] = ("sentence1", "sentence2")  # names of the texts of a sample: one, or a pair
    outputs: tuple[str, ...] = BERT_INPUTS

    def tokens(self) -> int:
        """Return the number of tokens."""
        return self.vocabulary.count("\n") + 1

    def encode(self, texts: Sequence[Sequence[str]]) -> dict[str, NDArray[np.int64]]:
        """Return token ids, attention mask, and token types `[N, length]` of N texts or pairs of texts.

        The longer text of a pair is truncated first.
        """
        return _encode(_build_wordpiece(self.vocabulary, self.length), texts, self.length, self.outputs)


@dataclass(frozen=True, slots=True)
class SentencePiece:
    """ALBERT's uncased tokenizer: lower case, no accents, the most likely division of each word into known pieces."""

    pieces: tuple[str, ...]  # in the order of their ids
    scores: tuple[Finite, ...]  # log-probabilities of the pieces
    length: StoredCount  # of the padded or truncated sequences
    charsmap: str = ""  # SentencePiece's precompiled map of characters, in base64
    texts: tuple[str, ...] = ("sentence1", "sentence2")  # names of the texts of a sample: one, or a pair
    outputs: tuple[str, ...] = BERT_INPUTS

    def tokens(self) -> int:
        """Return the number of tokens."""
        return len(self.pieces)

    def encode(self, texts: Sequence[Sequence[str]]) -> dict[str, NDArray[np.int64]]:
        """Return token ids, attention mask, and token types `[N, length]`, as `WordPiece.encode`."""
        tokenizer = _build_sentencepiece(self.pieces, self.scores, self.charsmap, self.length)
        return _encode(tokenizer, texts, self.length, self.outputs)


@dataclass(frozen=True, slots=True)
class TokenizerFile:
    """Any tokenizer of Hugging Face, as the content of its `tokenizer.json`."""

    definition: str  # JSON
    length: StoredCount  # of the padded or truncated sequences
    pad: str  # the token that fills up sequences
    texts: tuple[str, ...] = ("sentence1", "sentence2")  # names of the texts of a sample: one, or a pair
    outputs: tuple[str, ...] = BERT_INPUTS  # those of BERT that the model takes

    def tokens(self) -> int:
        """Return the number of tokens."""
        return int(_build_tokenizer(self.definition, self.length, self.pad).get_vocab_size(with_added_tokens=True))

    def encode(self, texts: Sequence[Sequence[str]]) -> dict[str, NDArray[np.int64]]:
        """Return token ids and the other outputs `[N, length]`, as `WordPiece.encode`."""
        tokenizer = _build_tokenizer(self.definition, self.length, self.pad)
        return _encode(tokenizer, texts, self.length, self.outputs)


Tokenizer = WordPiece | SentencePiece | TokenizerFile


@dataclass(frozen=True, slots=True)
class ImageSize:
    """The steps of an image processor of Hugging Face: resize, then crop the center."""

    height: StoredCount  # of the result
    width: StoredCount
    resize: tuple[StoredCount, StoredCount] | StoredCount | None = None  # height and width, or the shorter side
    resample: Resample = "bilinear"


@dataclass(frozen=True, slots=True)
class Preprocessing:
    """How raw inputs become samples; the default is not at all."""

    resize: StoredCount | ImageSize | None = None  # a number: the shorter side, of which the center square is cropped
    tokenizer: Tokenizer | None = None
    columns: tuple[str, ...] = ()  # names of the features of a table, in their order


NO_PREPROCESSING = Preprocessing()


def _encode(
    tokenizer: Any, texts: Sequence[Sequence[str]], length: int, outputs: Sequence[str]
) -> dict[str, NDArray[np.int64]]:
    import numpy as np

    with _no_panics():
        encoded = tokenizer.encode_batch([tuple(row) if len(row) > 1 else row[0] for row in texts])
    columns = dict(zip(BERT_INPUTS, ATTRIBUTES, strict=True))
    return {
        name: np.array([getattr(item, columns[name]) for item in encoded], dtype=np.int64).reshape(-1, length)
        for name in outputs
    }


@contextmanager
def _no_panics() -> Iterator[None]:
    """Turn panics of the library, which a damaged map of characters or pattern causes, into errors."""
    try:
        yield
    except BaseException as error:
        if type(error).__module__ != "pyo3_runtime":
            raise
        what = "its map of characters is invalid, or one of its patterns"
        raise DataError(f"The tokenizer is damaged: {what}. Use the published file.") from None


@lru_cache(maxsize=4)
def _build_wordpiece(vocabulary: str, length: int) -> Any:
    library = optional_import("tokenizers", extra="text")
    ids = {token: number for number, token in enumerate(vocabulary.split("\n"))}
    _check_special(ids, SPECIAL, "Use a BERT vocabulary")
    tokenizer = library.Tokenizer(library.models.WordPiece(ids, unk_token=UNK))
    tokenizer.normalizer = library.normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
    return _frame(tokenizer, ids, PAD, length)


@lru_cache(maxsize=4)
def _build_sentencepiece(pieces: tuple[str, ...], scores: tuple[float, ...], charsmap: str, length: int) -> Any:
    library = optional_import("tokenizers", extra="text")
    ids = {piece: number for number, piece in enumerate(pieces)}
    _check_special(ids, (ALBERT_PAD, ALBERT_UNK, CLS, SEP), "Use the tokenizer.json of an ALBERT")
    norm = library.normalizers
    steps = [norm.Replace("``", '"'), norm.Replace("''", '"'), norm.NFKD(), norm.StripAccents(), norm.Lowercase()]
    try:
        vocabulary = list(zip(pieces, scores, strict=True))
        model = library.models.Unigram(vocabulary, unk_id=ids[ALBERT_UNK], byte_fallback=False)
        steps += [norm.Precompiled(b64decode(charsmap, validate=True))] if charsmap else []
    except Exception as error:  # tokenizers raises no exception of its own
        raise DataError(f"The tokenizer is damaged ({first_line(error)}). Use the published file.") from error
    tokenizer = library.Tokenizer(model)
    tokenizer.normalizer = norm.Sequence(steps)
    before = library.pre_tokenizers
    tokenizer.pre_tokenizer = before.Sequence([before.WhitespaceSplit(), before.Metaspace()])
    return _frame(tokenizer, ids, ALBERT_PAD, length)


@lru_cache(maxsize=4)
def _build_tokenizer(definition: str, length: int, pad: str) -> Any:
    library = optional_import("tokenizers", extra="text")
    try:
        with _no_panics():
            tokenizer = library.Tokenizer.from_str(definition)
    except DataError:
        raise
    except Exception as error:  # tokenizers raises no exception of its own
        raise DataError(f"The tokenizer is damaged ({first_line(error)}). Save it again.") from error
    pad_id = tokenizer.token_to_id(pad)
    if pad_id is None:
        raise DataError(f"The tokenizer has no token {pad!r} to pad with. Set its pad_token, and save it again.")
    tokenizer.enable_truncation(length, strategy="longest_first")
    tokenizer.enable_padding(length=length, pad_id=pad_id, pad_token=pad)
    return tokenizer


def _check_special(ids: dict[str, int], special: Sequence[str], advice: str) -> None:
    missing = [token for token in special if token not in ids]
    if missing:
        raise DataError(f"The vocabulary of {len(ids)} tokens has no {', '.join(missing)}. {advice}.")


def _frame(tokenizer: Any, ids: dict[str, int], pad: str, length: int) -> Any:
    """Add the special tokens of BERT, and truncate or pad to a length."""
    library = optional_import("tokenizers", extra="text")
    tokenizer.post_processor = library.processors.BertProcessing((SEP, ids[SEP]), (CLS, ids[CLS]))
    tokenizer.enable_truncation(length, strategy="longest_first")
    tokenizer.enable_padding(length=length, pad_id=ids[pad], pad_token=pad)
    return tokenizer
