"""Every kind of input becomes the arrays of the model, and a violation of the contract is one sentence."""

from __future__ import annotations

import io
import os
import struct
import subprocess
import sys
from base64 import b64encode
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from plateaux.core.errors import DataError
from plateaux.data.data_summary import TensorSummary
from plateaux.data.files import decode
from plateaux.data.preprocessing import Preprocessing, SentencePiece, WordPiece
from plateaux.prediction.contract import InputContract
from plateaux.prediction.inputs import prepare

PIXELS = np.random.default_rng(0).integers(0, 256, (3, 8, 6), dtype=np.uint8)
TOKENS = "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "cat", "dog", "##s", "sat", "ran", ".", ","])


def contract(
    dtype: str = "uint8",
    shape: tuple[int, ...] = (3, 8, 6),
    low: float | None = 0.0,
    high: float | None = 255.0,
    **steps: Any,
) -> InputContract:
    return InputContract({"x": TensorSummary(dtype, shape, low, high)}, 2, ("no", "yes"), **steps)


def text_contract(texts: tuple[str, ...] = ("sentence1", "sentence2")) -> InputContract:
    tokenizer = WordPiece(TOKENS, 12, texts)
    summary = TensorSummary("int64", (12,), 0.0, 11.0)
    return InputContract(
        dict.fromkeys(tokenizer.outputs, summary), 2, (), preprocessing=Preprocessing(tokenizer=tokenizer)
    )


def rows(x: Any, what: InputContract) -> np.ndarray[Any, Any]:
    return prepare(x, what).arrays["x"]


def test_arrays_and_tensors_of_one_image_and_of_a_batch_are_equal() -> None:
    expected = PIXELS.astype(np.float32)[None] / np.float32(255)
    for x in (PIXELS, torch.from_numpy(PIXELS), PIXELS[None], expected[0], torch.from_numpy(expected), [PIXELS]):
        found = rows(x, contract())
        assert found.dtype == np.float32
        assert np.array_equal(found, expected)
    assert rows([PIXELS, expected[0]], contract()).shape == (2, 3, 8, 6)
    assert rows(torch.from_numpy(expected).bfloat16(), contract()).dtype == np.float32


def test_gray_images_need_no_channel_axis() -> None:
    gray = contract(shape=(1, 8, 6))
    for count in (1, 3, 8):
        images = np.resize(PIXELS, (count, 8, 6))
        expected = prepare(images[:, None], gray).arrays["x"]
        np.testing.assert_array_equal(prepare(images, gray).arrays["x"], expected)
        np.testing.assert_array_equal(prepare(images[0], gray).arrays["x"], expected[:1])


@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (3, "RGB"), (4, "RGBA")])
def test_image_objects_files_and_bytes_are_decoded(channels: int, mode: str, tmp_path: Path) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (8, 6, channels), dtype=np.uint8)
    image = Image.fromarray(pixels.squeeze(), mode)
    file = tmp_path / "a.png"
    image.save(file)
    what = contract(shape=(channels, 8, 6))
    expected = pixels.transpose(2, 0, 1)[None].astype(np.float32) / np.float32(255)
    for x in (image, file, str(file), file.read_bytes()):
        assert np.array_equal(rows(x, what), expected)
    both = prepare([file, str(file)], what)
    assert both.names == (str(file), str(file))
    assert len(both) == 2
    assert prepare(image, what).names == ()


def test_files_are_resized_as_in_training(tmp_path: Path) -> None:
    file = tmp_path / "wide.png"
    Image.fromarray(np.random.default_rng(2).integers(0, 256, (20, 31, 3), dtype=np.uint8)).save(file)
    what = contract(shape=(3, 8, 8), preprocessing=Preprocessing(resize=8))
    expected = decode(file, size=8).numpy().astype(np.float32) / np.float32(255)
    assert np.array_equal(rows(file, what)[0], expected)
    with pytest.raises(DataError, match=r"has 31 x 20 pixels\. Expected: 8 x 8, as in training; .* resize it"):
        rows(file, contract(shape=(3, 8, 8)))


def test_the_range_of_training_floats_determines_the_scale_of_pixels() -> None:
    unit, unscaled = contract("float32", high=1.0), contract("float32", high=254.0)
    assert rows(PIXELS, unit).max() <= 1
    assert np.array_equal(rows(PIXELS, unscaled)[0], PIXELS.astype(np.float32))
    with pytest.raises(DataError, match=r"trained on floats from -2\.1 to 2\.6 .*same way as the training data"):
        rows(PIXELS, contract("float32", low=-2.1, high=2.6))


REJECTED = [
    (PIXELS.astype(np.float32), contract(), r"float32 from 0 to 249\. .*divide them by 255, or pass uint8"),
    (PIXELS.astype(np.float32), contract("float32", high=1.0), r"floats from 0 to 1 of shape"),
    (PIXELS.astype(np.float32), contract("float32", low=-2.1, high=2.6), "another scale"),
    (PIXELS.astype(np.float32) / 255, contract("float32", high=255.0), "another scale"),
    (np.full((3, 8, 6), -1.5), contract(), "do not normalize them, the model does"),
    (PIXELS.astype(np.int64), contract(), r"int64 from 0 to 249\. .*or pass uint8"),
    (PIXELS.transpose(1, 2, 0), contract(), r"\[8, 6, 3\]\. .*Channels are last: .*x\.transpose\(2, 0, 1\)"),
    (torch.zeros(2, 8, 6, 3), contract(), r"x\.permute\(0, 3, 1, 2\) of torch"),
    (PIXELS[:1], contract(), "number of channels is 1, not 3"),
    (np.zeros((4, 4)), contract(), r"\[4, 4\]\. Expected: \[3, 8, 6\], or \[N, 3, 8, 6\]"),
    (np.zeros((0, 3, 8, 6)), contract(), r"has shape \[0, 3, 8, 6\]"),
    (np.full((3, 8, 6), np.nan), contract(), "contains NaN or infinity"),
    (np.full(5, np.inf), contract("float32", (5,), -1.0, 1.0), "contains NaN or infinity"),
    (np.full(5, 1e6), contract("float32", (5,), -1.0, 1.0), "another scale"),
    (np.array(["a", "b"]), contract(shape=(2,)), "has dtype <U1"),
    (np.zeros(4), contract("int64", (4,), 0.0, 9.0), "dtype float64. Expected: integers from 0 to 9"),
    (np.array([1, -1, 0, 0]), contract("int64", (4,), 0.0, 9.0), "contains -1"),
    ([[1.0, 2.0], [3.0]], contract("float32", (2,), 0.0, 9.0), "cannot become an array"),
    ([], contract(), "list of inputs is empty"),
    ("cat.jpg", contract("float32", (5,), -1.0, 1.0), "a str, an image or a path. Expected: floats from -1 to 1"),
    (b"no image", contract(), "cannot be decoded as an image"),
    ({"y": PIXELS}, contract(), r"are named \['y'\]\. Expected: uint8"),
    ("one text", text_contract(), r"is 1 texts\. Expected: 2 texts, 'sentence1', 'sentence2'"),
    (7, text_contract(), "is a int. Expected: 2 texts"),
    ({"sentence1": ["a"], "sentence2": ["b", "c"]}, text_contract(), "1 of 'sentence1', 2 of 'sentence2'"),
]


@pytest.mark.parametrize(("x", "what", "message"), REJECTED)
def test_the_error_for_invalid_inputs_is_one_line(x: Any, what: InputContract, message: str) -> None:
    with pytest.raises(DataError, match=message) as error:
        prepare(x, what)
    assert "\n" not in str(error.value)


def test_values_outside_the_training_range_are_accepted() -> None:
    what = contract("float32", (5,), -1.0, 1.0)
    assert rows(np.full(5, 3.0), what).shape == (1, 5)
    assert rows([1.0, 0.0, 0.0, 0.0, 2.0], what).shape == (1, 5)
    assert rows(np.zeros(5), contract("float32", (5,), None, None)).shape == (1, 5)


def test_integers_outside_their_range_are_an_error_but_masks_may_be_0_and_1() -> None:
    ids = contract("int64", (3,), 1.0, 9.0)
    assert rows(np.array([0, 1, 9]), ids).tolist() == [[0, 1, 9]]
    for value in (-1, 10):
        with pytest.raises(DataError, match=rf"contains {value}\. Expected: integers from 1 to 9"):
            rows(np.array([1, 1, value]), ids)
    mask = contract("int64", (3,), 1.0, 1.0)
    assert rows(np.array([0, 1, 1]), mask).tolist() == [[0, 1, 1]]
    with pytest.raises(DataError, match="contains 7"):
        rows(np.array([0, 1, 7]), mask)


def test_floats_of_images_may_exceed_the_unit_range_by_rounding_only() -> None:
    for excess, is_accepted in ((0.0009, True), (0.002, False), (0.5, False)):
        for image in (np.full((3, 8, 6), 1 + excess), np.full((3, 8, 6), -excess)):
            if is_accepted:
                assert rows(image, contract()).shape == (1, 3, 8, 6)
            else:
                with pytest.raises(DataError, match="Expected: uint8, or floats from 0 to 1"):
                    rows(image, contract())


def test_the_schema_has_the_columns_ranges_and_labels() -> None:
    table = contract("float32", (2,), 0.0, 1.0, preprocessing=Preprocessing(columns=("age", "it's")))
    schema = table.to_json_schema()
    row = schema["properties"]["inputs"]["items"]
    assert row["required"] == ["age", "it's"]
    assert row["properties"]["it's"] == {"type": "number", "minimum": -10.0, "maximum": 11.0}
    assert schema["labels"] == ["no", "yes"]
    text = text_contract().to_json_schema()["properties"]["inputs"]["items"]
    assert text["properties"] == {"sentence1": {"type": "string"}, "sentence2": {"type": "string"}}
    ids = contract("int64", (2,), 0.0, 9.0).to_json_schema()["properties"]["inputs"]["items"]
    assert ids["items"] == {"type": "integer", "minimum": 0, "maximum": 9.0}


def test_single_texts_pairs_and_named_texts_are_tokenized() -> None:
    what = text_contract()
    named = prepare({"sentence1": "The cats sat.", "sentence2": "The cat ran."}, what)
    assert named.arrays["input_ids"].tolist() == [[2, 4, 5, 7, 8, 10, 3, 4, 5, 9, 10, 3]]
    pair = ("The cats sat.", "The cat ran.")
    for x in (pair, [pair], [[*pair]], {"sentence1": [pair[0]], "sentence2": [pair[1]]}, named.arrays):
        found = prepare(x, what).arrays
        assert all(np.array_equal(found[name], named.arrays[name]) for name in named.arrays)
    assert len(prepare([pair, pair], what)) == 2
    alone = prepare(["the cat", "the dog"], text_contract(("text",)))
    assert alone.arrays["input_ids"][:, :5].tolist() == [[2, 4, 5, 3, 0], [2, 4, 6, 3, 0]]
    assert len(prepare("the cat", text_contract(("text",)))) == 1
    with pytest.raises(DataError, match=r"'input_ids' contains 12\. Expected: integers from 0 to 11"):
        prepare({name: values + 1 for name, values in named.arrays.items()} | {"input_ids": np.full(12, 12)}, what)
    with pytest.raises(DataError, match=r"have \[1, 2\] rows"):
        prepare({**named.arrays, "attention_mask": np.ones((2, 12), dtype=int)}, what)


def test_the_tokenizer_is_that_of_bert() -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.BertTokenizer(vocab={t: i for i, t in enumerate(TOKENS.split("\n"))}, do_lower_case=True)
    ones = ["The cats, SAT.", "dögs ran\tran", "", "the " * 30, "cat"]
    twos = ["the cat", "cats dogs dogs", "dog", "sat. " * 20, "ran " * 30]
    expected = theirs(ones, twos, padding="max_length", truncation="longest_first", max_length=12)
    found = WordPiece(TOKENS, 12).encode(list(zip(ones, twos, strict=True)))
    assert {name: values.tolist() for name, values in found.items()} == {name: expected[name] for name in found}
    with pytest.raises(DataError, match=r"2 tokens has no \[UNK\], \[CLS\], \[SEP\]"):
        WordPiece("[PAD]\na", 12).encode([("a", "a")])


PIECES = ("<pad>", "<unk>", "[CLS]", "[SEP]", "▁the", "▁cat", "▁c", "at", "▁dog", "s", "▁", ".", '"', "w", "ran")
SCORES = (0.0, 0.0, 0.0, 0.0, -2.0, -7.5, -3.0, -4.0, -3.0, -2.5, -1.0, -2.0, -3.0, -5.0, -4.0)


def charsmap() -> bytes:
    """Return a map of SentencePiece, a trie as a double array and its strings, that replaces "q" by "w"."""
    units = [0] * 1024
    units[ord("q")] = ((ord("q") ^ 0x100) << 10) | (1 << 8) | ord("q")  # offset of the leaf, has a leaf, label
    return struct.pack("<I", 4 * len(units)) + struct.pack("<1024I", *units) + b"w\0"


@pytest.mark.parametrize("mapped", [False, True])
def test_the_tokenizer_is_that_of_albert(mapped: bool) -> None:
    transformers = pytest.importorskip("transformers")
    vocabulary = list(zip(PIECES, SCORES, strict=True))
    theirs = transformers.AlbertTokenizer(vocab=vocabulary, _spm_precompiled_charsmap=charsmap() if mapped else None)
    ones = ["The cats  ran.", "dögs q ran\tran", "", "the " * 30, "``cat''", "ﬁx q"]
    twos = ["the cat", "cats DOGS dogs", "dog", "ran. " * 20, "ran " * 30, "q q"]
    expected = theirs(
        ones, twos, padding="max_length", truncation="longest_first", max_length=12, return_token_type_ids=True
    )
    ours = SentencePiece(PIECES, SCORES, 12, b64encode(charsmap()).decode() if mapped else "")
    found = ours.encode(list(zip(ones, twos, strict=True)))
    assert {name: values.tolist() for name, values in found.items()} == {name: expected[name] for name in found}
    assert (13 in found["input_ids"]) is mapped  # "w"
    assert 1 in found["input_ids"]  # unknown


@pytest.mark.parametrize(
    ("pieces", "scores", "charsmap", "words"),
    [
        (PIECES[1:], SCORES[1:], "", "14 tokens has no <pad>"),
        (PIECES, SCORES[1:], "", "is damaged"),
        (PIECES, SCORES, "no base64", "is damaged"),
        (PIECES, SCORES, b64encode(b"abc").decode(), "is damaged"),
        (PIECES, SCORES, b64encode(bytes(64)).decode(), "map of characters is invalid"),
    ],
)
def test_a_damaged_tokenizer_is_refused(
    pieces: tuple[str, ...], scores: tuple[float, ...], charsmap: str, words: str
) -> None:
    pytest.importorskip("tokenizers")
    with pytest.raises(DataError, match=words):
        SentencePiece(pieces, scores, 12, charsmap).encode([("the cat", "dog")])


def test_a_contract_round_trips_through_its_dict() -> None:
    albert = Preprocessing(tokenizer=SentencePiece(PIECES, SCORES, 12, "AAAA"))
    for what in (
        contract(),
        text_contract(),
        contract(preprocessing=albert),
        contract("float32", (5,), None, None, mean=(0.5,), std=(0.1,)),
    ):
        assert InputContract.from_dict(what.to_dict(), "x") == what


def test_importing_the_checks_does_not_import_torch() -> None:
    code = "import sys, plateaux.prediction.inputs, plateaux.prediction.predictor; assert 'torch' not in sys.modules"
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    subprocess.run([sys.executable, "-c", code], check=True, env=env)


@pytest.mark.slow
def test_the_largest_image_is_refused_before_it_is_decoded() -> None:
    content = io.BytesIO()
    Image.new("1", (20_000, 20_000)).save(content, "png")
    with pytest.raises(DataError, match="is too large to decode"):
        prepare(content.getvalue(), contract(preprocessing=Preprocessing(resize=8)))
