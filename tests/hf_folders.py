"""Small folders of Hugging Face models and data sets, as save_pretrained and save_to_disk write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from plateaux.core.imports import optional_import

WORDS = tuple(f"w{number}" for number in range(16))
TINY_BERT: dict[str, Any] = {
    "vocab_size": 21, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
    "max_position_embeddings": 24,
}  # fmt: skip
TINY_VIT: dict[str, Any] = {
    "image_size": 16, "patch_size": 8, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 24,
}  # fmt: skip


def transformers() -> Any:
    return optional_import("transformers", extra="hf")


def datasets() -> Any:
    return optional_import("datasets", extra="hf")


def save_model(folder: Path, config: Any, *, task: str, seed: int = 0) -> Any:
    """Write a model with random weights, larger than at initialization, and return it."""
    auto = getattr(transformers(), task)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config.architectures = config.architectures or []  # DeiT needs a list
        network = auto.from_config(config)
        for param in network.parameters():
            if param.ndim > 1:
                param.data.normal_(std=max(0.3 * param.shape[-1] ** -0.5, 0.02))
    network.save_pretrained(folder)
    return network.eval()


def save_tokenizer(folder: Path, *, lower: bool = True) -> Any:
    """Write a WordPiece tokenizer of BERT with 21 tokens."""
    library = transformers()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]) + "\n")
    tokenizer = library.BertTokenizerFast(str(folder / "vocab.txt"), do_lower_case=lower)
    tokenizer.save_pretrained(folder)
    return tokenizer


def save_bert(
    folder: Path, *, labels: int = 2, task: str = "AutoModelForSequenceClassification", **changes: Any
) -> Any:
    """Write a small BERT with its tokenizer."""
    save_tokenizer(folder)
    config = transformers().BertConfig(**{**TINY_BERT, **changes}, num_labels=labels)
    return save_model(folder, config, task=task)


def save_vit(folder: Path, *, labels: int = 3, **changes: Any) -> Any:
    """Write a small vision transformer with its image processor."""
    config = transformers().ViTConfig(**{**TINY_VIT, **changes}, num_labels=labels)
    network = save_model(folder, config, task="AutoModelForImageClassification")
    size = {"height": config.image_size, "width": config.image_size}
    processor = optional_import("transformers.models.vit.image_processing_pil_vit", extra="hf").ViTImageProcessorPil
    processor(size=size, image_mean=[0.4, 0.5, 0.6], image_std=[0.2, 0.25, 0.3], resample=3).save_pretrained(folder)
    return network


def sentences(count: int, *, seed: int = 0) -> tuple[list[str], list[int]]:
    """Return texts of words whose label is whether the first word is in the first half of the vocabulary."""
    random = np.random.default_rng(seed)
    rows = [random.integers(0, 16, random.integers(3, 9)) for _ in range(count)]
    return [" ".join(WORDS[i] for i in row) for row in rows], [int(row[0] < 8) for row in rows]


def save_texts(folder: Path, *, train: int = 48, test: int = 24) -> Any:
    """Write a DatasetDict of texts with two named classes, and return it."""
    library = datasets()
    features = library.Features({"text": library.Value("string"), "label": library.ClassLabel(names=["late", "early"])})
    parts = {}
    for seed, (split, count) in enumerate((("train", train), ("test", test))):
        texts, labels = sentences(count, seed=seed)
        parts[split] = library.Dataset.from_dict({"text": texts, "label": labels}, features=features)
    made = library.DatasetDict(parts)
    made.save_to_disk(folder)
    return made


def pictures(count: int, *, seed: int = 0) -> tuple[list[Any], list[int]]:
    """Return images of different sizes in which one of three channels is bright; it is the label."""
    pillow = optional_import("PIL.Image", extra="hf")
    random = np.random.default_rng(seed)
    images, labels = [], []
    for number in range(count):
        pixels = random.integers(0, 100, (*random.integers(18, 40, 2), 3), dtype=np.uint8)
        pixels[..., number % 3] += 120
        images.append(pillow.fromarray(pixels))
        labels.append(number % 3)
    return images, labels


def save_pictures(folder: Path, *, train: int = 36, test: int = 18) -> Any:
    """Write a DatasetDict of images with three named classes, and return it."""
    library = datasets()
    features = library.Features({"image": library.Image(), "label": library.ClassLabel(names=["r", "g", "b"])})
    parts = {}
    for seed, (split, count) in enumerate((("train", train), ("test", test))):
        images, labels = pictures(count, seed=seed)
        parts[split] = library.Dataset.from_dict({"image": images, "label": labels}, features=features)
    made = library.DatasetDict(parts)
    made.save_to_disk(folder)
    return made
