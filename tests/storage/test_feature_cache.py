"""The feature cache: features equal those of the backbone, are computed once, and survive kills."""

from __future__ import annotations

import gc
import os
import pickle
import random
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from laws.meshes import mesh
from torch import Tensor

import plateaux
from plateaux.config.builders.data import build_loader, build_training_data, eval_batches
from plateaux.config.builders.model import build_backbone
from plateaux.config.components import Components
from plateaux.config.recipe import Recipe
from plateaux.core.errors import DataError, RecipeError
from plateaux.core.types import derive_seed, map_tensors
from plateaux.data.augment import Augment, crop_and_flip
from plateaux.data.corruptions.corrupt import Corrupted
from plateaux.data.sources import DatasetSource, DataSplits, InMemorySource, from_tensors
from plateaux.deploy.load_predictor import load_predictor
from plateaux.distributed.executors.local import SINGLE_PROCESS
from plateaux.evaluation.evaluate import evaluate
from plateaux.evaluation.ood import detect_ood
from plateaux.models.backbone import Backbone
from plateaux.prediction.soup import soup
from plateaux.storage import feature_cache
from plateaux.storage.feature_cache import (
    FeatureSource,
    FeatureTable,
    PrefixSource,
    cache_dir,
    prepare_features,
    through_backbone,
    training_sources,
    with_cached_features,
)
from plateaux.storage.local_store import LocalStore
from plateaux.storage.run import Run
from plateaux.training.train import train

DEFAULTS = feature_cache.SHARD_SAMPLES, feature_cache.BATCH_SAMPLES
RNG = torch.Generator().manual_seed(3)
IMAGES = torch.randint(0, 256, (70, 3, 16, 16), dtype=torch.uint8, generator=RNG)
LABELS = torch.arange(70) % 5
DATA = from_tensors((IMAGES[:50], LABELS[:50]), (IMAGES[50:], LABELS[50:]), classes=5, mean=(0.5,) * 3, std=(0.2,) * 3)
GIVEN = Components(data=DATA, trust=("tests.storage.test_feature_cache",))


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_cache, "SHARD_SAMPLES", 16)
    monkeypatch.setattr(feature_cache, "BATCH_SAMPLES", 4)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows by the number of samples whenever a backbone is run."""
    sizes: list[int] = []
    forward = Backbone.forward

    def counting_forward(self: Backbone, x: Tensor) -> Tensor:
        sizes.append(len(x))
        return forward(self, x)

    monkeypatch.setattr(Backbone, "forward", counting_forward)
    return sizes


def recipe(folder: Path, data: dict[str, Any] | None = None, **model: Any) -> Recipe:
    net = {"name": "cnn", "channels": [4, 6], "backbone": "features", "head": "mlp", "head_width": 6}
    return Recipe.from_dict(
        {
            "members": 2,
            "data": {"name": "given", "batch_size": 10, **(data or {})},
            "model": {**net, "cache_features": True, **model},
            "optimizer": {"name": "SGD", "lr": 0.05, "momentum": 0.9},
            "train": {"epochs": 3},
            "executor": {"threads": 1},
            "run": {"feature_cache": str(folder)},
        }
    )


def normal(images: Tensor) -> Tensor:
    return (images.float() - 127.5) / (0.2 * 255)


def content(folder: Path) -> dict[str, bytes]:
    return {name: LocalStore(folder).get(name) for name in LocalStore(folder).names()}


def test_cached_features_equal_the_backbone_bit_for_bit(tmp_path: Path) -> None:
    config = recipe(tmp_path)
    source = with_cached_features(config, DATA, GIVEN).train
    backbone = build_backbone(config, DATA, GIVEN)
    ids = torch.tensor([3, 49, 17, 3, 16, 0])
    x, y = source.fetch(ids)
    assert isinstance(x, Tensor)
    with torch.no_grad():
        by_chunks = torch.cat([backbone(normal(part)) for part in IMAGES[:50].split(4)])
        at_once = backbone(normal(IMAGES[:50]))
    assert torch.equal(x, by_chunks[ids])
    torch.testing.assert_close(x, at_once[ids], rtol=1e-5, atol=1e-6)  # rounding depends on the batch size
    assert torch.equal(y, LABELS[ids])
    assert source.fetch(ids[:0])[0].shape == (0, 6)  # type: ignore[union-attr]
    assert len(source) == 50
    assert source.fingerprint() == DATA.train.fingerprint()


def test_float16_features_need_half_the_space(tmp_path: Path) -> None:
    half, full = (
        with_cached_features(recipe(tmp_path, cache_dtype=kind), DATA, GIVEN).test for kind in ("float16", "float32")
    )
    ids = torch.arange(20)
    (x, _), (wanted, _) = half.fetch(ids), full.fetch(ids)
    assert isinstance(x, Tensor)
    assert x.dtype == torch.float16
    assert torch.equal(x, wanted.to(torch.float16))  # type: ignore[union-attr]
    assert not torch.equal(x.float(), wanted)  # type: ignore[arg-type]
    sizes = [sum(len(v) for n, v in content(tmp_path).items() if source._unaugmented.folder in n and "labels" not in n
                 and "about" not in n) for source in (half, full)]  # type: ignore[attr-defined]  # fmt: skip
    assert sizes[1] - sizes[0] == 20 * 6 * 2


def test_features_that_overflow_are_rejected(tmp_path: Path) -> None:
    config = recipe(tmp_path, cache_dtype="float16")
    backbone = build_backbone(config, DATA, GIVEN)
    with torch.no_grad():
        backbone.model[1][0].weight.mul_(1e9)  # type: ignore[index,operator,union-attr]
    with pytest.raises(DataError, match="cache_dtype = 'float32'"):
        through_backbone(config, DATA, DATA.test, backbone).fetch(torch.arange(2))


@pytest.mark.slow
def test_a_killed_build_continues_to_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_cache, "SHARD_SAMPLES", 4)

    def source(folder: Path) -> FeatureSource:
        train_source = with_cached_features(recipe(folder, {"flip": True}, cached_augmentations=2), DATA, GIVEN).train
        assert isinstance(train_source, FeatureSource)
        return train_source

    def build(folder: Path, begun: int) -> None:
        before = FeatureTable.build

        def slowly(self: FeatureTable, shard: int) -> int:
            os.write(begun, b".")
            time.sleep(0.005)
            return before(self, shard)

        FeatureTable.build = slowly  # type: ignore[method-assign]
        prepare_features([source(folder)], SINGLE_PROCESS)

    prepare_features([source(tmp_path / "whole")], SINGLE_PROCESS)
    whole, chance, killed = content(tmp_path / "whole"), random.Random(5), 0
    for _ in range(10):
        begins, begun = os.pipe()
        child = os.fork()
        if child == 0:  # killed while it builds
            build(tmp_path / "killed", begun)
            os._exit(0)
        os.close(begun)
        os.read(begins, 1)
        time.sleep(chance.uniform(0.0, 0.05))
        os.kill(child, signal.SIGKILL)
        killed += os.waitpid(child, 0)[1] == signal.SIGKILL
        os.close(begins)
        assert content(tmp_path / "killed").items() <= whole.items()  # existing shards are complete
    assert killed >= 3
    prepare_features([source(tmp_path / "killed")], SINGLE_PROCESS)
    assert content(tmp_path / "killed") == whole
    assert not list(tmp_path.rglob(".part-*"))
    assert len(whole) == 2 * (4 * 13 + 1)  # features and labels with their digests, and about.json


def test_a_second_run_does_not_run_the_backbone(tmp_path: Path, passes: list[int]) -> None:
    config = recipe(tmp_path / "features", {"validation": 10})
    first = train(config, tmp_path / "one", **GIVEN.keywords())
    assert sum(passes) == 50 + 2  # every image once for all members and epochs, and two in the check of the model
    passes.clear()
    second = train(config.replaced(members=3), tmp_path / "two", **GIVEN.keywords())
    assert passes == [2]
    assert all(torch.equal(first.weights(1)[name], tensor) for name, tensor in second.weights(1).items())


def test_training_on_features_equals_training_on_images(tmp_path: Path) -> None:
    runs = [
        train(recipe(tmp_path / "f", cache_features=cached), tmp_path / str(cached), **GIVEN.keywords())
        for cached in (True, False)
    ]
    for number in range(2):
        torch.testing.assert_close(*[run.weights(number) for run in runs], rtol=1e-4, atol=1e-5)
    assert runs[0].info.data == runs[1].info.data


def test_a_process_that_trains_from_cached_features_holds_the_backbone_once(tmp_path: Path) -> None:
    counts: list[int] = []

    def count(_: object) -> None:
        gc.collect()
        counts.append(sum(type(each) is Backbone for each in gc.get_objects()))

    gc.collect()
    gc.freeze()  # only what this test makes is counted, and a collection does not visit every object of the process
    try:
        train(recipe(tmp_path / "cache"), tmp_path / "run", **GIVEN.keywords(), progress=count)
    finally:
        gc.unfreeze()
    assert max(counts) == 1


def test_every_epoch_selects_one_cached_augmentation_per_sample(tmp_path: Path) -> None:
    config = recipe(tmp_path, {"crop": 2, "flip": True}, cached_augmentations=3)
    data = with_cached_features(config, DATA, GIVEN)
    backbone = build_backbone(config, DATA, GIVEN)
    augment = Augment(crop=2, flip=True)
    ids = torch.arange(50)
    with torch.no_grad():
        varied = [
            backbone(
                normal(
                    crop_and_flip(
                        IMAGES[:50], ids, seed=derive_seed(derive_seed("features"), "augment", number), augment=augment
                    )
                )
            )  # type: ignore[arg-type]
            for number in range(3)
        ]
        plain = backbone(normal(IMAGES[:50]))
    selected = []
    for epoch in range(4):
        feed = build_loader(config, data, 0, shared=False, device=torch.device("cpu"), ids=ids)
        (batch,) = feed.batches(ids, epoch, batch_size=50)
        near = torch.stack([(batch.x - features).abs().amax(1) for features in varied])  # type: ignore[operator]
        assert float(near.amin(0).max()) < 1e-5
        selected.append(near.argmin(0))
    assert {int(n) for numbers in selected for n in numbers} == {0, 1, 2}
    assert not torch.equal(selected[0], selected[1])
    (batch,) = eval_batches(config, data, data.train, ids, batch_size=50)
    torch.testing.assert_close(batch.x, plain, rtol=1e-5, atol=1e-5)
    assert [
        len(source.tables()) for source in training_sources(config.replaced(data={"validation_split": 10}), data)
    ] == [
        3,
        1,
    ]  # type: ignore[attr-defined]


def test_everything_that_changes_a_feature_changes_its_folder(tmp_path: Path) -> None:
    config = recipe(tmp_path)
    other = replace(DATA, train=InMemorySource(IMAGES[:50].flip(0), LABELS[:50]))
    varied = {"flip": True}
    made: list[tuple[Recipe, DataSplits]] = [
        (config, DATA),
        (config, other),
        (config, replace(DATA, mean=(0.4,) * 3)),
        (config.replaced(seed=1), DATA),  # another backbone
        (config.replaced(model={"image_size": 20}), DATA),
        (config.replaced(model={"backbone": "0"}), DATA),
        (config.replaced(model={"cache_dtype": "float16"}), DATA),
        (config.replaced(train={"memory_format": "channels_last"}), DATA),
        (config.replaced(data=varied), DATA),
        (config.replaced(data={**varied, "crop": 1}), DATA),
    ]
    tables = [with_cached_features(config_, data, Components(data=data)).train.tables()[0] for config_, data in made]  # type: ignore[attr-defined]
    assert len({table.folder for table in tables}) == len(made)
    same = with_cached_features(
        config.replaced(optimizer={"lr": 1.0}, model={"head": "linear"}, members=7), DATA, GIVEN
    ).train
    assert same.tables()[0].folder == tables[0].folder  # type: ignore[attr-defined]


def test_unlabeled_samples_are_cached_too(tmp_path: Path, passes: list[int]) -> None:
    components = replace(GIVEN, unlabeled=InMemorySource(IMAGES[:30].flip(3), torch.zeros(30, dtype=torch.int64)))
    method = {"name": "a2d", "diversity_weight": 0.5}
    config = Recipe.from_dict({**recipe(tmp_path / "f").to_dict(), "method": method})
    first = train(config, tmp_path / "one", **components.keywords())
    assert sum(passes) == 80 + 2
    passes.clear()
    second = train(config, tmp_path / "two", **components.keywords())
    assert passes == [2]  # in the check of the model
    third = train(config.replaced(model={"cache_features": False}), tmp_path / "three", **components.keywords())
    for name, tensor in first.weights(0).items():
        assert torch.equal(tensor, second.weights(0)[name])
        torch.testing.assert_close(tensor, third.weights(0)[name], rtol=1e-3, atol=1e-5)
    extra = with_cached_features(config, build_training_data(config, components), components).unlabeled
    assert extra is not None
    assert isinstance(extra.source, FeatureSource)


def foreign_patches() -> DataSplits:
    """Random images, as an out-of-distribution data set."""
    x = torch.randint(0, 256, (24, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(9))
    return from_tensors((x[:0], LABELS[:0]), (x, torch.zeros(24, dtype=torch.int64)), classes=1)


def test_evaluation_uses_features_of_test_corrupted_and_ood_samples(tmp_path: Path, passes: list[int]) -> None:
    config = recipe(tmp_path / "f", head="linear")
    run = train(config, tmp_path / "run", **GIVEN.keywords())
    members = load_predictor(plateaux.open_run(tmp_path / "run", data=GIVEN.data, model=GIVEN.model)).ensemble
    passes.clear()
    run = Run.open(tmp_path / "run", GIVEN)
    splits = ["test", "corrupted:fog:3@8"]
    results = evaluate(run, split=splits, metrics=["nll"], cache_logits="off")
    assert sum(passes) == 20 + 8
    outside = detect_ood(run, {"near": ["tests.storage.test_feature_cache:foreign_patches"]}, cache_logits="off")
    assert sum(passes) == 20 + 8 + 24
    foggy, _ = Corrupted(DATA.test, "fog", 3).fetch(torch.arange(8))
    for result, images in zip(results, (IMAGES[50:], foggy), strict=True):
        assert isinstance(images, Tensor)
        log_p = members.predict(images).log()
        nll = -float(log_p[torch.arange(len(images)), LABELS[50 : 50 + len(images)]].mean())
        assert result.rows["ensemble (mean probability)"].value == pytest.approx(nll, rel=1e-4)
    passes.clear()
    again = evaluate(run, split=splits, metrics=["nll"], cache_logits="off")
    assert [result.rows for result in again] == [result.rows for result in results]
    assert [
        result.rows
        for result in detect_ood(
            run, {"near": ["tests.storage.test_feature_cache:foreign_patches"]}, cache_logits="off"
        )
    ] == [result.rows for result in outside]
    mixed = soup(plateaux.Run.open(tmp_path / "run", GIVEN), tmp_path / "soup", split="test", max_barrier=100.0)
    assert passes == []
    assert run.weights_hash(0) != mixed.weights_hash(0)
    assert (mixed.recipe.model.backbone, mixed.recipe.model.head) == ("features", "linear")


def test_members_in_float64_keep_their_own_backbone(tmp_path: Path) -> None:
    config = recipe(tmp_path / "f").replaced(train={"precision": "fp64"})
    train(config, tmp_path / "run", **GIVEN.keywords())
    (result,) = evaluate(plateaux.Run.open(tmp_path / "run", GIVEN), metrics=["nll"])
    opened = plateaux.open_run(tmp_path / "run", data=GIVEN.data, model=GIVEN.model)
    wanted = load_predictor(opened).ensemble.predict(IMAGES[50:]).log()
    assert wanted.dtype == torch.float64
    nll = -float(wanted[torch.arange(20), LABELS[50:]].mean())
    assert result.rows["ensemble (mean probability)"].value == pytest.approx(nll, rel=1e-4)


def test_features_of_samples_without_a_content_hash_are_refused(tmp_path: Path) -> None:
    class WithoutHash(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 20

        def __getitem__(self, i: int) -> tuple[Tensor, int]:
            return IMAGES[i], int(LABELS[i])

    config = recipe(tmp_path / "f")
    for split in ("train", "test"):
        with pytest.raises(RecipeError, match="fingerprint"):
            train(config, tmp_path / split, data=replace(DATA, **{split: DatasetSource(WithoutHash())}))


def test_named_inputs_are_passed_to_the_backbone(tmp_path: Path) -> None:
    class Sums(torch.nn.Module):
        shape = (2,)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return torch.stack([a, b], 1).float()

        def hash(self) -> str:
            return "sums"

    words = InMemorySource({"a": torch.arange(5), "b": torch.arange(5) * 2}, torch.arange(5))
    source = FeatureSource(words, Sums(), LocalStore(tmp_path), feature_cache.FeatureSpec())  # type: ignore[arg-type]
    assert source.fetch(torch.tensor([4, 1]))[0].tolist() == [[4, 8], [1, 2]]  # type: ignore[union-attr]
    assert map_tensors(source.without_augmentation().fetch(torch.tensor([2]))[0], lambda t: t.tolist()) == [[2, 4]]


def test_a_pickled_copy_opens_its_own_memory_maps(tmp_path: Path) -> None:
    source = with_cached_features(recipe(tmp_path), DATA, GIVEN).train
    wanted, _ = source.fetch(torch.arange(50))
    assert isinstance(source, FeatureSource)
    assert source._unaugmented._maps
    copied = pickle.loads(pickle.dumps(source))
    assert not copied._unaugmented._maps
    assert torch.equal(copied.fetch(torch.arange(50))[0], wanted)


def test_the_cache_folder_comes_from_recipe_environment_or_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unset = recipe(tmp_path).replaced(run={"feature_cache": None})
    assert cache_dir(recipe(tmp_path)) == str(tmp_path)
    monkeypatch.setenv("PLATEAUX_CACHE", "/somewhere")
    assert cache_dir(unset) == "/somewhere/features"
    monkeypatch.delenv("PLATEAUX_CACHE")
    assert cache_dir(unset).endswith(".cache/plateaux/features")


def test_a_few_samples_form_a_separate_source(tmp_path: Path, passes: list[int]) -> None:
    config = recipe(tmp_path)
    backbone = build_backbone(config, DATA, GIVEN)
    few = through_backbone(config, DATA, DATA.train, backbone, ids=torch.arange(5))
    assert isinstance(few.source, PrefixSource)
    assert len(few) == 5
    assert sum([prepare_features([few], SINGLE_PROCESS), *passes]) == 10
    assert few.fingerprint() != DATA.train.fingerprint()
    most = through_backbone(config, DATA, DATA.train, backbone, ids=torch.arange(40))
    assert most.source is DATA.train


def build_share(folder: str) -> tuple[int, list[str]]:
    """Build this process's share of the features; return the number of samples and all features."""
    from plateaux.distributed.executors.mesh import mesh as meshed

    defaults = feature_cache.SHARD_SAMPLES, feature_cache.BATCH_SAMPLES
    feature_cache.SHARD_SAMPLES, feature_cache.BATCH_SAMPLES = 16, 4
    try:
        source = with_cached_features(recipe(Path(folder)), DATA, GIVEN).train
        made = prepare_features([source], meshed())
        x, _ = source.fetch(torch.arange(50))
    finally:  # other tests use the same process
        feature_cache.SHARD_SAMPLES, feature_cache.BATCH_SAMPLES = defaults
    return made, np.asarray(x).round(4).tolist()


@pytest.mark.process
def test_processes_of_a_mesh_share_the_build(tmp_path: Path) -> None:
    (one, first), (two, second) = mesh(2).run("tests.storage.test_feature_cache:build_share", str(tmp_path / "mesh"))
    assert (one, two) == (32, 18)  # shards 0 and 2, 1 and 3
    assert first == second
    prepare_features([with_cached_features(recipe(tmp_path / "alone"), DATA, GIVEN).train], SINGLE_PROCESS)
    assert content(tmp_path / "mesh") == content(tmp_path / "alone")


@pytest.mark.process
def test_joint_training_on_cached_features_is_the_same_on_a_mesh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feature_cache, "SHARD_SAMPLES", DEFAULTS[0])
    monkeypatch.setattr(feature_cache, "BATCH_SAMPLES", DEFAULTS[1])
    tree = recipe(
        tmp_path / "here", {"name": "cases:patches", "batch_size": 12, "unlabeled": "cases:static@13"}
    ).to_dict()
    tree |= {"method": {"name": "a2d", "diversity_weight": 0.5}}
    alone = train(Recipe.from_dict(tree), tmp_path / "alone", trust=("cases",))
    spread = {**tree, "executor": {"name": "mesh", "threads": 1}, "run": {"feature_cache": str(tmp_path / "there")}}
    mesh(2).run("laws.meshes:train_here", spread, str(tmp_path / "spread"))
    there = Run.open(tmp_path / "spread")
    for number in range(2):
        assert all(torch.equal(tensor, there.weights(number)[name]) for name, tensor in alone.weights(number).items())
    assert content(tmp_path / "here") == content(tmp_path / "there")
