"""How raw inputs became the samples of a data set: the size of images, the tokenizer of texts. Stored in the run.

Importing this module needs neither torch nor NumPy, because `plateaux status` reads run folders with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from plateaux.core.bounded import PositiveCount
from plateaux.core.errors import DataError
from plateaux.core.optional import optional_import

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PAD, UNK, CLS, SEP = SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
BERT_INPUTS = ("input_ids", "attention_mask", "token_type_ids")
ATTRIBUTES = ("ids", "attention_mask", "type_ids")  # of an encoding, in the order of the outputs of BERT


@dataclass(frozen=True, slots=True)
class WordPiece:
    """BERT's tokenizer: lower case, punctuation split off, words divided into the longest known pieces."""

    vocabulary: str  # one token per line, in the order of their ids
    length: PositiveCount  # of the padded or truncated sequences
    texts: tuple[str, ...] = ("sentence1", "sentence2")  # names of the texts of a sample: one, or a pair
    outputs: tuple[str, ...] = BERT_INPUTS

    def tokens(self) -> int:
        """Return the number of tokens."""
        return self.vocabulary.count("\n") + 1

    def encode(self, texts: Sequence[Sequence[str]]) -> dict[str, NDArray[np.int64]]:
        """Return token ids, attention mask, and token types `[N, length]` of N texts or pairs of texts.

        The longer text of a pair is truncated first.
        """
        import numpy as np

        tokenizer = _build(self.vocabulary, self.length)
        encoded = tokenizer.encode_batch([tuple(row) if len(row) > 1 else row[0] for row in texts])
        columns = dict(zip(BERT_INPUTS, ATTRIBUTES, strict=True))
        return {
            name: np.array([getattr(item, columns[name]) for item in encoded], dtype=np.int64).reshape(-1, self.length)
            for name in self.outputs
        }


@dataclass(frozen=True, slots=True)
class Preprocessing:
    """How raw inputs become samples; the default is not at all."""

    resize: PositiveCount | None = None  # images: the shorter side, of which the center square is cropped
    tokenizer: WordPiece | None = None


NO_PREPROCESSING = Preprocessing()


@lru_cache(maxsize=4)
def _build(vocabulary: str, length: int) -> Any:
    library = optional_import("tokenizers", extra="text")
    ids = {token: number for number, token in enumerate(vocabulary.split("\n"))}
    missing = [token for token in SPECIAL if token not in ids]
    if missing:
        raise DataError(f"The vocabulary of {len(ids)} tokens has no {', '.join(missing)}. Use a BERT vocabulary.")
    tokenizer = library.Tokenizer(library.models.WordPiece(ids, unk_token=UNK))
    tokenizer.normalizer = library.normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = library.processors.BertProcessing((SEP, ids[SEP]), (CLS, ids[CLS]))
    tokenizer.enable_truncation(length, strategy="longest_first")
    tokenizer.enable_padding(length=length, pad_id=ids[PAD], pad_token=PAD)
    return tokenizer
