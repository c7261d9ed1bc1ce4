"""Data sets of Hugging Face datasets: texts, pairs, images, columns, splits, and preparation equal to transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hf_folders import (
    datasets,
    pictures,
    save_bert,
    save_pictures,
    save_texts,
    save_tokenizer,
    save_vit,
    sentences,
    transformers,
)
from torch.utils.data import DataLoader

import plateaux
from plateaux.config.builders.data import build_data
from plateaux.core.errors import DataError, PlateauxError, RecipeError
from plateaux.core.imports import optional_import
from plateaux.core.registry import dataset
from plateaux.data.images import to_pixels
from plateaux.data.preprocessing import ImageSize, TokenizerFile
from plateaux.data.sources import DataSplits
from plateaux.integrations import huggingface_data
from plateaux.integrations.huggingface_processors import read_image_processor, read_tokenizer_folder

pytest.importorskip("datasets")


def load(folder: Path, **options: Any) -> DataSplits:
    made: DataSplits = dataset.get(f"hf:{folder}")(**options)
    return made


def all_of(source: Any) -> tuple[Any, torch.Tensor]:
    return source.fetch(torch.arange(len(source)))  # type: ignore[no-any-return]


def test_texts_are_tokenized_like_transformers(tmp_path: Path) -> None:
    made, tokenizer = save_texts(tmp_path / "d"), save_tokenizer(tmp_path / "t")
    data = load(tmp_path / "d", vocabulary=str(tmp_path / "t"), length=8)
    assert (data.classes, data.labels, data.shape) == (2, ("late", "early"), (8,))
    for source, split in ((data.train, "train"), (data.test, "test")):
        x, y = all_of(source)
        expected = tokenizer(
            list(made[split]["text"]), padding="max_length", truncation=True, max_length=8, return_tensors="pt"
        )
        assert set(x) == {"input_ids", "attention_mask", "token_type_ids"}
        assert all(torch.equal(x[name], expected[name]) for name in x)
        assert y.tolist() == list(made[split]["label"])


def test_pairs_of_texts_are_tokenized_like_transformers_and_in_predictions(tmp_path: Path) -> None:
    library, tokenizer = datasets(), save_tokenizer(tmp_path / "t")
    one, label = sentences(30)
    two, _ = sentences(30, seed=9)
    table = library.Dataset.from_dict({"number": list(range(30)), "a": one, "b": two, "same": label})
    table.save_to_disk(tmp_path / "d")
    data = load(tmp_path / "d", vocabulary=str(tmp_path / "t"), length=10, label="same")
    assert (len(data.train), len(data.test), data.classes) == (24, 6, 2)
    kept = sorted({" ".join(row) for row in zip(one, two, strict=True)})
    ids = [i for i in range(30)]
    expected = tokenizer(one, two, padding="max_length", truncation=True, max_length=10, return_tensors="pt")
    rows = {tuple(expected["input_ids"][i].tolist()): label[i] for i in ids}
    assert len(rows) == len(kept) == 30
    found = [all_of(data.train), all_of(data.test)]
    for x, y in found:
        assert [rows[tuple(row.tolist())] for row in x["input_ids"]] == y.tolist()
    assert len({tuple(row.tolist()) for x, _ in found for row in x["input_ids"]}) == 30  # no sample is in both
    assert data.preprocessing.tokenizer is not None
    encoded = data.preprocessing.tokenizer.encode([(one[3], two[3])])
    assert encoded["token_type_ids"][0].tolist() == expected["token_type_ids"][3].tolist()
    assert data.preprocessing.tokenizer.texts == ("a", "b")


@pytest.mark.parametrize("kind", ["BPE", "Unigram", "cased WordPiece"])
def test_every_fast_tokenizer_is_stored_completely(tmp_path: Path, kind: str) -> None:
    """What a run stores gives the ids of transformers without transformers: BPE as in RoBERTa, and others."""
    library, texts = transformers(), [*sentences(20)[0], "Ünïcode w1, W2!", ""]
    raw = optional_import("tokenizers", extra="hf")
    if kind == "cased WordPiece":
        tokenizer = save_tokenizer(tmp_path / "t", lower=False)
    else:
        model, trainer = {
            "BPE": (raw.models.BPE(), raw.trainers.BpeTrainer),
            "Unigram": (raw.models.Unigram(), raw.trainers.UnigramTrainer),
        }[kind]
        made = raw.Tokenizer(model)
        made.pre_tokenizer = raw.pre_tokenizers.ByteLevel(add_prefix_space=True)
        special = ["<s>", "<pad>", "</s>", "<unk>"]
        options = {"unk_token": "<unk>"} if kind == "Unigram" else {}
        made.train_from_iterator(texts, trainer(vocab_size=60, special_tokens=special, show_progress=False, **options))
        made.post_processor = raw.processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
        tokenizer = library.PreTrainedTokenizerFast(
            tokenizer_object=made,
            pad_token="<pad>",
            unk_token="<unk>",
            model_input_names=["input_ids", "attention_mask"],
        )
        tokenizer.save_pretrained(tmp_path / "t")
    stored = read_tokenizer_folder(tmp_path / "t", 9, ("text",))
    expected = tokenizer(texts, padding="max_length", truncation=True, max_length=9, return_tensors="np")
    found = stored.encode([(text,) for text in texts])
    assert set(found) == set(tokenizer.model_input_names)
    assert all(np.array_equal(found[name], expected[name]) for name in found)
    assert stored.tokens() == len(tokenizer)
    again = TokenizerFile(stored.definition, 9, stored.pad, ("text",), stored.outputs)
    assert np.array_equal(again.encode([("w1 w2",)])["input_ids"], stored.encode([("w1 w2",)])["input_ids"])


def test_the_tokenizer_is_by_default_that_of_the_model(tmp_path: Path) -> None:
    save_bert(tmp_path / "m")
    save_texts(tmp_path / "d")
    tree: dict[str, Any] = {"data": {"name": f"hf:{tmp_path / 'd'}"}, "model": {"name": f"hf:{tmp_path / 'm'}"}}
    data = build_data(plateaux.Recipe.from_dict(tree))
    assert data.shape == (128,)
    with pytest.raises(RecipeError, match=r"data\.vocabulary is not set"):
        build_data(plateaux.Recipe.from_dict({**tree, "model": {"name": "minilm"}}))
    named = {**tree["data"], "vocabulary": str(tmp_path / "m")}
    other = build_data(plateaux.Recipe.from_dict({"data": named, "model": {"name": "minilm"}}))
    assert other.train.fingerprint() == data.train.fingerprint()
    (tmp_path / "words.txt").write_text((tmp_path / "m" / "vocab.txt").read_text())
    named = {**tree["data"], "vocabulary": str(tmp_path / "words.txt")}
    of_file = build_data(plateaux.Recipe.from_dict({"data": named, "model": {"name": "minilm"}}))
    assert torch.equal(all_of(of_file.train)[0]["input_ids"], all_of(data.train)[0]["input_ids"])


PROCESSORS: dict[str, dict[str, Any]] = {
    "ViT": {"size": {"height": 16, "width": 24}},
    "ViT bicubic": {"size": {"height": 40, "width": 40}, "resample": 3},
    "ViT without normalization": {"size": {"height": 16, "width": 16}, "do_normalize": False},
    "CLIP": {"size": {"shortest_edge": 20}, "crop_size": {"height": 16, "width": 16}},
    "CLIP with a crop outside": {"size": {"shortest_edge": 16}, "crop_size": {"height": 21, "width": 20}},
    "ConvNext": {"size": {"shortest_edge": 28}, "crop_pct": 0.875},
    "ConvNext large": {"size": {"shortest_edge": 384}},
    "DeiT": {"size": {"height": 24, "width": 24}, "crop_size": {"height": 16, "width": 16}},
}
MODULES = {"ViT": "vit", "CLIP": "clip", "ConvNext": "convnext", "DeiT": "deit"}


def save_processor(folder: Path, kind: str, **options: Any) -> Any:
    transformers()
    module = optional_import(f"transformers.models.{MODULES[kind]}.image_processing_pil_{MODULES[kind]}", extra="hf")
    processor = getattr(module, f"{kind}ImageProcessorPil")(**options)
    processor.save_pretrained(folder)
    return processor


@pytest.mark.parametrize("kind", PROCESSORS)
def test_images_are_prepared_like_transformers(tmp_path: Path, kind: str) -> None:
    processor = save_processor(tmp_path / "p", kind.split()[0], **PROCESSORS[kind])
    found = read_image_processor(tmp_path / "p")
    assert isinstance(found.size, ImageSize)
    for image in pictures(6)[0]:
        expected = processor(image, return_tensors="np")["pixel_values"][0]
        values = to_pixels(image, size=found.size) / np.float64(255)
        if found.mean:
            values = (values - np.array(found.mean)[:, None, None]) / np.array(found.std)[:, None, None]
        np.testing.assert_allclose(values, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rescale_factor": 1 / 127.5}, "does more than resizing"),
        ({"do_rescale": False}, "does more than resizing"),
        ({"do_resize": False}, "does not give images of one size"),
        ({"size": {"longest_edge": 3, "shortest_edge": 2}}, "does more than resizing|does not give images"),
    ],
)
def test_processors_with_other_steps_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    save_processor(tmp_path / "p", "ViT", **options)
    with pytest.raises(PlateauxError, match=message):
        read_image_processor(tmp_path / "p")


def test_images_have_the_size_and_normalization_of_the_model(tmp_path: Path) -> None:
    save_vit(tmp_path / "m")
    made = save_pictures(tmp_path / "d")
    tree = {"data": {"name": f"hf:{tmp_path / 'd'}"}, "model": {"name": f"hf:{tmp_path / 'm'}"}}
    data = build_data(plateaux.Recipe.from_dict(tree))
    assert (data.shape, data.classes, data.labels) == ((3, 16, 16), 3, ("r", "g", "b"))
    assert (data.mean, data.std) == ((0.4, 0.5, 0.6), (0.2, 0.25, 0.3))
    x, y = all_of(data.train)
    processor = transformers().AutoImageProcessor.from_pretrained(tmp_path / "m", backend="pil")
    expected = processor(list(made["train"]["image"]), return_tensors="pt")["pixel_values"]
    mean, std = (torch.tensor(values)[:, None, None] for values in (data.mean, data.std))
    torch.testing.assert_close((x / 255 - mean) / std, expected, rtol=0, atol=1e-5)
    assert y.tolist() == list(made["train"]["label"])


def save_images(folder: Path, *splits: list[Any]) -> None:
    """Write the images of the splits train and test, with the labels 0, 1, 0, 1, ..."""
    library = datasets()
    features = library.Features({"image": library.Image(), "label": library.ClassLabel(names=["no", "yes"])})
    parts = [{"image": images, "label": [i % 2 for i in range(len(images))]} for images in splits]
    made = [library.Dataset.from_dict(part, features=features) for part in parts]
    library.DatasetDict(dict(zip(("train", "test"), made, strict=True))).save_to_disk(folder)


def of_one_value(*value: int) -> Any:
    pixels = np.full((4, 5, len(value)), value, dtype=np.uint8)
    return optional_import("PIL.Image", extra="hf").fromarray(pixels[..., 0] if len(value) == 1 else pixels)


@pytest.mark.parametrize("order", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_color_is_kept_although_some_images_are_gray(tmp_path: Path, order: tuple[int, ...]) -> None:
    images = [of_one_value(200, 10, 30) if has_color else of_one_value(7) for has_color in order]
    for name, splits in (("train", (images, [of_one_value(7)])), ("test", ([of_one_value(7)], images))):
        save_images(tmp_path / name, *splits)
        data = load(tmp_path / name)
        assert data.shape == (3, 4, 5)
        x, _ = all_of(getattr(data, name))
        assert x[:, :, 0, 0].tolist() == [[200, 10, 30] if has_color else [7, 7, 7] for has_color in order]


def test_gray_images_have_one_channel(tmp_path: Path) -> None:
    save_images(tmp_path / "d", [of_one_value(7)] * 3, [of_one_value(8)])
    data = load(tmp_path / "d")
    assert (data.shape, all_of(data.train)[0].unique().tolist()) == ((1, 4, 5), [7])


def test_a_color_image_that_was_not_expected_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_data, "IMAGES_LOOKED_AT", 2)
    save_images(tmp_path / "d", [of_one_value(7), of_one_value(200, 10, 30), of_one_value(7)], [of_one_value(8)])
    data = load(tmp_path / "d")
    assert data.shape == (1, 4, 5)
    with pytest.raises(DataError, match=r"Image 1 of the column 'image' is in color.*\.convert\('RGB'\)"):
        all_of(data.train)


def test_images_of_16_bits_are_scaled_to_8_bits(tmp_path: Path) -> None:
    values = (np.arange(20) * 3000).astype(np.uint16).reshape(4, 5)
    save_images(tmp_path / "d", [optional_import("PIL.Image", extra="hf").fromarray(values)] * 2, [of_one_value(8)])
    data = load(tmp_path / "d")
    assert data.shape == (1, 4, 5)
    assert all_of(data.train)[0][0, 0].tolist() == (values // 256).tolist()


def test_an_image_that_would_become_too_large_is_refused() -> None:
    narrow = optional_import("PIL.Image", extra="hf").new("RGB", (60_000, 1))
    for size in (ImageSize(224, 224, 224), ImageSize(8, 8, (20_000, 20_000)), 224):
        with pytest.raises(DataError, match="The resized image is too large to decode"):
            to_pixels(narrow, size=size)


WORDPIECE = {"type": "WordPiece", "unk_token": "a", "max_input_chars_per_word": 9, "vocab": {"a": 0, "[PAD]": 1}}
DAMAGED: dict[str, Any] = {
    "no model": {},
    "an id that does not exist": {"model": {"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": 9}},
    "a map of characters": {
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
        "model": {**WORDPIECE, "continuing_subword_prefix": "#"},
    },
    "a pattern that never ends": {
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False},
        "model": {**WORDPIECE, "continuing_subword_prefix": "#"},
    },
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_tokenizer_in_a_run_is_a_data_error(kind: str) -> None:
    definition = json.dumps({"version": "1.0", **DAMAGED[kind]})
    with pytest.raises(DataError, match="The tokenizer is damaged"):
        TokenizerFile(definition, 8, "[PAD]").encode([("a" * 30 + "!", "b")])


def test_images_keep_their_size_without_an_image_processor(tmp_path: Path) -> None:
    library, pillow = datasets(), optional_import("PIL.Image", extra="hf")
    pixels = np.random.default_rng(0).integers(0, 256, (10, 6, 5), dtype=np.uint8)
    features = library.Features({"picture": library.Image(), "digit": library.ClassLabel(num_classes=2)})
    rows = {"picture": [pillow.fromarray(each) for each in pixels], "digit": [0, 1] * 5}
    library.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "d")
    data = load(tmp_path / "d")
    assert (data.shape, data.classes, data.mean) == ((1, 6, 5), 2, ())
    found = torch.cat([all_of(data.train)[0], all_of(data.test)[0]])
    assert sorted(found.flatten(1).tolist()) == sorted(pixels.reshape(10, -1).tolist())


def test_workers_read_the_same_images(tmp_path: Path) -> None:
    save_pictures(tmp_path / "d", train=8)
    save_processor(tmp_path / "p", "ViT", size={"height": 8, "width": 8})
    data = load(tmp_path / "d", image_processor=str(tmp_path / "p"))
    table = data.train.dataset  # type: ignore[attr-defined]
    rows = torch.cat([x for x, _ in DataLoader(table, batch_size=4, num_workers=1)])
    assert torch.equal(rows, all_of(data.train)[0])


def test_the_fingerprint_depends_on_samples_and_preparation(tmp_path: Path) -> None:
    save_pictures(tmp_path / "d")
    for size in (8, 9):
        save_processor(tmp_path / str(size), "ViT", size={"height": size, "width": size})
    one, again = (load(tmp_path / "d", image_processor=str(tmp_path / "8")).train.fingerprint() for _ in range(2))
    other = load(tmp_path / "d", image_processor=str(tmp_path / "9")).train.fingerprint()
    fewer = load(tmp_path / "d", image_processor=str(tmp_path / "8"), limit=30).train.fingerprint()
    assert one == again
    assert len({one, other, fewer}) == 3


def test_labels_can_be_names_or_numbers_and_splits_can_be_named(tmp_path: Path) -> None:
    library = datasets()
    save_tokenizer(tmp_path / "t")
    texts, _ = sentences(6)
    parts = {
        "a": {"t": texts, "y": ["no", "yes", "no", "no", "yes", "no"], "n": [0, 1, 2, 2, 1, 0]},
        "b": {"t": texts[:2], "y": ["yes", "no"], "n": [2, 0]},
        "c": {"t": texts[:2], "y": ["yes", "maybe"], "n": [-1, -1]},
    }
    made = library.DatasetDict({name: library.Dataset.from_dict(rows) for name, rows in parts.items()})
    made.save_to_disk(tmp_path / "d")
    options: dict[str, Any] = {"vocabulary": str(tmp_path / "t"), "columns": ("t",), "length": 8}
    data = load(tmp_path / "d", label="y", splits=("a", "b"), **options)
    assert (data.labels, all_of(data.test)[1].tolist()) == (("no", "yes"), [1, 0])
    data = load(tmp_path / "d", label="n", splits=("a", "b"), limit=5, test_limit=1, **options)
    assert (data.classes, len(data.train), all_of(data.test)[1].tolist()) == (3, 5, [2])
    for wrong, message in (
        ({"label": "n", "splits": ("a", "c")}, "sample 0 has the label -1.*A split without labels has -1"),
        (
            {"label": "y", "splits": ("a", "c")},
            "sample 1 has the label 'maybe' in the column 'y' of the split 'c'.*the 2 classes.*'no', 'yes'",
        ),
        ({"label": "n"}, "has the splits a, b, c. Name training and test split in data.splits"),
        ({"label": "n", "splits": ("a", "d")}, "has no split 'd'"),
        ({"splits": ("a", "b")}, "Name that of the labels in data.label"),
        ({"label": "x", "splits": ("a", "b")}, "has no column 'x'"),
        ({"label": "y", "splits": ("a", "b"), "columns": ("t", "n")}, "one text, two texts, or one image"),
    ):
        with pytest.raises(PlateauxError, match=message):
            load(tmp_path / "d", **{**options, **wrong})


@pytest.mark.parametrize("is_text", [True, False])
@pytest.mark.parametrize("is_single", [True, False])
def test_the_limit_does_not_change_the_classes(tmp_path: Path, is_text: bool, is_single: bool) -> None:
    """The samples are sorted by class, and the first ones are of class 1 only."""
    library, _ = datasets(), save_tokenizer(tmp_path / "t")
    labels = [1] * 20 + [0] * 20 + [2] * 20
    rows = {"text": ["w1"] * 60, "label": [("a", "b", "c")[label] for label in labels] if is_text else labels}
    made = library.Dataset.from_dict(rows)
    (made if is_single else library.DatasetDict(train=made, test=made)).save_to_disk(tmp_path / "d")
    options: dict[str, Any] = {"vocabulary": str(tmp_path / "t"), "length": 4}
    data = load(tmp_path / "d", limit=5, test_limit=2, **options)
    assert (data.classes, data.labels) == (3, ("a", "b", "c") if is_text else ("0", "1", "2"))
    assert (all_of(data.train)[1].tolist(), all_of(data.test)[1].tolist()) == ([1] * 5, [1] * 2)
    assert load(tmp_path / "d", limit=5, **options).classes == 3  # the test split has all classes


def test_the_limit_does_not_change_the_channels(tmp_path: Path) -> None:
    save_images(tmp_path / "d", [of_one_value(7), of_one_value(200, 10, 30)], [of_one_value(8)])
    assert load(tmp_path / "d", limit=1).shape == (3, 4, 5)


def test_a_class_number_that_would_fill_the_memory_is_refused(tmp_path: Path) -> None:
    library = datasets()
    part = library.Dataset.from_dict({"text": ["w1", "w2"], "label": [0, 10**12]})
    library.DatasetDict(train=part, test=part).save_to_disk(tmp_path / "d")
    with pytest.raises(DataError, match="has the label 1,000,000,000,000 in the column 'label'"):
        load(tmp_path / "d")


def test_labels_of_a_test_split_with_other_class_names_are_matched_by_name(tmp_path: Path) -> None:
    library, _ = datasets(), save_tokenizer(tmp_path / "t")

    def part(names: list[str]) -> Any:
        features = library.Features({"text": library.Value("string"), "label": library.ClassLabel(names=names)})
        return library.Dataset.from_dict({"text": ["w1", "w2"], "label": [0, 1]}, features=features)

    options: dict[str, Any] = {"vocabulary": str(tmp_path / "t"), "length": 4}
    for name, test in {"swapped": ["b", "a"], "numbered": ["0", "1"], "other": ["a", "c"]}.items():
        library.DatasetDict(train=part(["a", "b"]), test=part(test)).save_to_disk(tmp_path / name)
    assert all_of(load(tmp_path / "swapped", **options).test)[1].tolist() == [1, 0]
    assert all_of(load(tmp_path / "numbered", **options).test)[1].tolist() == [0, 1]
    with pytest.raises(DataError, match="sample 1 has the label 'c' in the column 'label' of the split 'test'"):
        load(tmp_path / "other", **options)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"text": ["w1"]}, "the test split 'validation' has no column 'label'.*Its columns are text"),
        ({"label": [0], "other": ["w1"]}, "the test split 'validation' has no column 'text'.*are label, other"),
        ({"label": [0], "text": [["w1"]]}, r"has a column 'text' of type List\(Value\('string'\)\)"),
        ({"label": [0], "text": [3]}, r"has a column 'text' of type Value\('int64'\)\. Expected: Value\('string'\)"),
    ],
)
def test_a_test_split_with_other_columns_is_an_error(tmp_path: Path, rows: dict[str, Any], message: str) -> None:
    library = datasets()
    train = library.Dataset.from_dict({"text": ["w1", "w2"], "label": [0, 1]})
    library.DatasetDict(train=train, validation=library.Dataset.from_dict(rows)).save_to_disk(tmp_path / "d")
    save_tokenizer(tmp_path / "t")
    with pytest.raises(DataError, match=message):
        load(tmp_path / "d", vocabulary=str(tmp_path / "t"), length=4)


def test_parquet_files_of_a_hub_are_read_by_split(tmp_path: Path) -> None:
    made = save_pictures(tmp_path / "d", train=9, test=6)
    (tmp_path / "p" / "data").mkdir(parents=True)
    for split, part in made.items():
        for number in range(2):
            part.shard(2, number, contiguous=True).to_parquet(
                tmp_path / "p/data" / f"{split}-0000{number}-of-00002.parquet"
            )
    save_processor(tmp_path / "s", "ViT", size={"height": 8, "width": 8})
    options = {"image_processor": str(tmp_path / "s")}
    found, expected = load(tmp_path / "p", **options), load(tmp_path / "d", **options)
    assert found.labels == expected.labels
    for one, two in ((found.train, expected.train), (found.test, expected.test)):
        assert torch.equal(all_of(one)[0], all_of(two)[0])
        assert torch.equal(all_of(one)[1], all_of(two)[1])
    shutil.copytree(tmp_path / "p" / "data", tmp_path / "p" / "other")
    with pytest.raises(DataError, match="several configurations of parquet files"):
        load(tmp_path / "p", **options)


def test_damaged_and_hostile_folders_are_data_errors(tmp_path: Path) -> None:
    library = datasets()
    save_texts(tmp_path / "d")
    save_texts(tmp_path / "outside")
    save_tokenizer(tmp_path / "t")
    options = {"vocabulary": str(tmp_path / "t"), "length": 8}

    def check(name: str, change: Any, message: str) -> None:
        shutil.copytree(tmp_path / "d", tmp_path / "copy")
        file = tmp_path / "copy" / name
        tree = json.loads(file.read_text())
        change(tree)
        file.write_text(json.dumps(tree))
        with pytest.raises(PlateauxError, match=message):
            load(tmp_path / "copy", **options)
        shutil.rmtree(tmp_path / "copy")

    arrow = next((tmp_path / "outside" / "train").glob("*.arrow"))
    check("train/state.json", lambda t: t.update(_data_files=[{"filename": str(arrow)}]), "not in its folder")
    check("train/state.json", lambda t: t.update(_data_files=[{"filename": "missing.arrow"}]), "cannot be read")
    check("train/state.json", lambda t: t.update(_data_files=None, _fingerprint=3), "cannot be read|samples")
    check("dataset_dict.json", lambda t: t.update(splits=["../outside/train"]), "no folders in it")
    check("dataset_dict.json", lambda t: t.update(splits=[".."]), "no folders in it")
    check("dataset_dict.json", lambda t: t.update(splits="train"), "no folders in it")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"neither state\.json nor parquet files"):
        load(tmp_path / "empty")
    secret = tmp_path / "secret.png"
    pictures(1)[0][0].save(secret)
    features = library.Features({"image": library.Image(decode=False), "label": library.Value("int64")})
    rows = {"image": [{"bytes": None, "path": str(secret)}] * 5, "label": [0, 1, 0, 1, 0]}
    table = library.Dataset.from_dict(rows, features=features)
    (tmp_path / "paths").mkdir()
    table.to_parquet(tmp_path / "paths" / "train.parquet")
    with pytest.raises(DataError, match="at most a path, which is not opened"):
        load(tmp_path / "paths")
