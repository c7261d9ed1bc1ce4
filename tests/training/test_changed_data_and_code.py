"""A run is not resumed with other samples or another model by accident."""

from __future__ import annotations

import importlib.util
import linecache
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from cases import OBJECTS
from torch import Tensor, nn
from typer.testing import CliRunner

import plateaux
from plateaux.cli.main import app
from plateaux.config.code import source_hash
from plateaux.core.errors import DataError, RunError
from plateaux.data.data_check import SAMPLED_INPUTS
from plateaux.data.samples import sample_ids
from plateaux.data.sources import HASHED_SAMPLES, DatasetSource, DataSplits, from_dataset
from plateaux.storage.run import Run


class Rows:
    """Samples without a fingerprint; `shift` changes all labels, `noise` makes inputs random."""

    def __init__(self, n: int = 64, *, shift: int = 0, noise: str = "none") -> None:
        self.n, self.shift, self.noise = n, shift, noise
        self.generator = torch.Generator().manual_seed(torch.seed() if noise == "own" else 0)

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        x = torch.tensor([float(i), 1.0]) / self.n
        if self.noise == "own":
            x = x + torch.rand((), generator=self.generator)
        elif self.noise == "global":
            x = x + torch.rand(()) + float(np.random.rand())
        return x, (i + self.shift) % 3


class Labeled(Rows):
    """Samples whose labels are in memory, as those of torchvision."""

    def __init__(self, n: int = 64, *, changed: int | None = None) -> None:
        super().__init__(n)
        self.targets = [i % 3 for i in range(n)]
        if changed is not None:
            self.targets[changed] = 0

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return super().__getitem__(i)[0], self.targets[i]


def splits(train: Any) -> DataSplits:
    return from_dataset(train, Rows(8), classes=3, shape=(2,))


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 3))


def other_network() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3))


class Scaled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input)


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Damaged(Rows):
    """A data set with one sample that cannot be read, which the checks do not read."""

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        read = {*sample_ids(self.n, SAMPLED_INPUTS).tolist(), *sample_ids(self.n, HASHED_SAMPLES).tolist()}
        if i == min(set(range(self.n)) - read):
            raise OSError("the file is truncated")
        return super().__getitem__(i)


CHOSEN: dict[str, type[nn.Linear]] = {"class": Scaled}


def chosen() -> nn.Module:
    return CHOSEN["class"](2, 3)


def train(out: Path, data: Any = None, model: Any = network, **more: Any) -> Run:
    return plateaux.train(OBJECTS, out, data=splits(Rows() if data is None else data), model=model, **more)


def test_a_resume_with_other_labels_of_a_dataset_is_refused_with_a_diff(tmp_path: Path) -> None:
    train(tmp_path)
    train(tmp_path)
    with pytest.raises(RunError, match=r"(?s)\(stored -> given\):\n  train\.fingerprint: .* -> .*--accept-changes"):
        train(tmp_path, Rows(shift=1))


def test_one_changed_label_is_found_where_labels_are_in_memory(tmp_path: Path) -> None:
    train(tmp_path, Labeled())
    train(tmp_path, Labeled())
    with pytest.raises(RunError, match=r"train\.fingerprint"):
        train(tmp_path, Labeled(changed=37))


@pytest.mark.parametrize("noise", ["own", "global"])
def test_random_items_are_not_mistaken_for_changed_ones(tmp_path: Path, noise: str) -> None:
    train(tmp_path, Rows(noise=noise))
    train(tmp_path, Rows(noise=noise))
    with pytest.raises(RunError, match=r"train\.fingerprint"):
        train(tmp_path, Rows(noise=noise, shift=1))


def test_a_fingerprint_reads_a_fixed_sample_and_preserves_the_random_state() -> None:
    class Counted(Rows):
        read: ClassVar[set[int]] = set()

        def __getitem__(self, i: int) -> tuple[Tensor, int]:
            self.read.add(i)
            return super().__getitem__(i)

    source = DatasetSource(Counted(10**6, noise="global"), name="large")
    before = torch.get_rng_state()
    first = source.fingerprint()
    assert torch.equal(torch.get_rng_state(), before)
    assert len(Counted.read) <= 16
    assert source.fingerprint() == first


def test_a_resume_with_another_layer_of_equal_shapes_is_refused_with_a_diff(tmp_path: Path) -> None:
    run = train(tmp_path)
    assert run.info.layers is not None
    assert run.info.layers["1"] == "ReLU()"
    assert Run.open(tmp_path).info == run.info
    with pytest.raises(RunError, match=r"(?s)model\.layers\.1: 'ReLU\(\)' -> 'Tanh\(\)'.*code of model: "):
        train(tmp_path, model=other_network)


def test_a_resume_with_another_class_behind_the_same_function_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path, model=chosen)
    train(tmp_path, model=chosen)
    monkeypatch.setitem(CHOSEN, "class", Doubled)
    with pytest.raises(RunError, match=r"code of layer .*Doubled: \(unset\)"):
        train(tmp_path, model=chosen)


def load(file: Path, text: str) -> Any:
    file.write_text(text, encoding="utf-8")
    linecache.checkcache(str(file))
    spec = importlib.util.spec_from_file_location("user_code", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.build


def test_comments_and_formatting_do_not_change_the_source(tmp_path: Path) -> None:
    text = "from torch import nn\ndef build():\n    return nn.Linear(2, {})\n"
    first = source_hash(load(tmp_path / "a.py", text.format("3")))
    same = source_hash(load(tmp_path / "b.py", "# more\n\n" + text.format("  3") + "    # end\n"))
    other = source_hash(load(tmp_path / "c.py", text.format("4")))
    assert first == same != other
    assert first is not None


def test_bound_arguments_are_part_of_the_source() -> None:
    hashes = {source_hash(partial(Rows, n)) for n in (3, 4)}
    assert len(hashes) == 2


def test_a_model_without_source_is_compared_by_its_layers(tmp_path: Path) -> None:
    names: dict[str, Any] = {"nn": nn}
    exec("def build(): return nn.Linear(2, 3)", names)
    exec("def wide(): return nn.Sequential(nn.Linear(2, 5), nn.Linear(5, 3))", names)
    run = train(tmp_path, model=names["build"])
    assert run.info.layers is not None
    assert "model" not in run.info.code
    train(tmp_path, model=names["build"])
    with pytest.raises(RunError, match=r"model\.layers\.0: \(unset\) -> 'Linear\(in_features=2, out_features=5"):
        train(tmp_path, model=names["wide"])


def test_a_built_in_model_has_no_record(tmp_path: Path) -> None:
    recipe = OBJECTS.replaced(data={"name": "blobs"}, model={"name": "mlp"})
    assert plateaux.train(recipe, tmp_path).info.layers is None


def test_accepted_changes_are_recorded_in_the_run(tmp_path: Path) -> None:
    train(tmp_path)
    run = train(tmp_path, Rows(shift=1), other_network, accept_changes=True)
    (changes,) = run.info.accepted_changes
    assert [line.split(":")[0] for line in changes] == ["train.fingerprint", "model.layers.1", "code of model"]
    assert Run.open(tmp_path).info.accepted_changes == run.info.accepted_changes
    train(tmp_path, Rows(shift=1), other_network)  # what was accepted is now the data of the run
    with pytest.raises(RunError, match="other data or with other model code"):
        train(tmp_path)
    assert len(train(tmp_path, accept_changes=True).info.accepted_changes) == 2


def test_accept_changes_does_not_accept_another_recipe(tmp_path: Path) -> None:
    train(tmp_path)
    with pytest.raises(RunError, match="belongs to another recipe"):
        plateaux.train(OBJECTS.replaced(seed=7), tmp_path, data=splits(Rows()), model=network, accept_changes=True)


def test_the_command_line_has_the_option_accept_changes(tmp_path: Path) -> None:
    def write(shift: int) -> None:
        x, y = np.random.default_rng(0).random((40, 2), dtype=np.float32), (np.arange(40) + shift) % 2
        np.savez(tmp_path / "a.npz", x_train=x, y_train=y, x_test=x, y_test=y)

    recipe = OBJECTS.replaced(
        data={"name": "arrays", "path": "a.npz", "root": str(tmp_path)}, model={"name": "mlp"}, members=1
    )
    (tmp_path / "recipe.toml").write_text(recipe.to_toml(), encoding="utf-8")
    arguments = ["train", str(tmp_path / "recipe.toml"), "--out", str(tmp_path / "run"), "--no-evaluate"]
    write(0)
    assert CliRunner().invoke(app, arguments).exit_code == 0
    write(1)
    refused = CliRunner().invoke(app, arguments)
    assert refused.exit_code == 4
    assert CliRunner().invoke(app, [*arguments, "--accept-changes"]).exit_code == 0
    assert len(Run.open(tmp_path / "run").info.accepted_changes) == 1


def test_data_may_change_until_a_member_has_trained_an_epoch(tmp_path: Path) -> None:
    """After an unreadable sample was removed, as its message says, the same folder can be used."""
    with pytest.raises(DataError, match="the file is truncated"):
        train(tmp_path, Damaged())
    run = train(tmp_path, Rows(63))
    assert (run.info.data.train.samples, run.info.accepted_changes) == (63, ())
    with pytest.raises(RunError, match="was trained on other data"):
        train(tmp_path, Rows(62))
