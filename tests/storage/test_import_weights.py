"""Weights trained elsewhere become the members of a run: names, patterns, a forward pass, and code in files."""

from __future__ import annotations

import os
import pickle
import zipfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from checkpoint_networks import small_net
from torch import nn
from typer.testing import CliRunner

import plateaux
from plateaux.cli.main import app
from plateaux.core.errors import RecipeError
from plateaux.models.weight_files import Skipped, read_checkpoint


def data() -> plateaux.DataSplits:
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 80)
    return plateaux.from_arrays(rng.normal(size=(80, 2)) + y[:, None], np.array(["a", "b", "c"])[y])


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return small_net(shape=(2,), classes=3)


def recipe(members: int) -> plateaux.Recipe:
    tree = {"members": members, "data": {"name": "arrays", "path": "x"}, "model": {"name": "small_net"}}
    return plateaux.Recipe.from_dict(tree)


def under(prefix: str, module: nn.Module) -> dict[str, torch.Tensor]:
    return {prefix + name: tensor for name, tensor in module.state_dict().items()}


def import_files(out: Path, files: list[Any], **options: Any) -> plateaux.Run:
    return plateaux.import_weights(out, recipe(len(files)), files, data=data(), model=small_net, **options)


def assert_members_are(run: plateaux.Run, seeds: list[int]) -> None:
    """Compare with the networks themselves, on inputs standardized by hand."""
    splits = data()
    x, _ = splits.test.fetch(torch.arange(len(splits.test)))
    assert isinstance(x, torch.Tensor)
    scaled = ((x.double() - torch.tensor(splits.mean)) / torch.tensor(splits.std)).float()
    expected = torch.stack([network(seed).eval()(scaled) for seed in seeds])
    torch.testing.assert_close(
        plateaux.load_predictor(plateaux.open_run(run, model=small_net)).ensemble.logits(x), expected
    )


@pytest.mark.parametrize(
    "wrap",
    [
        lambda net: net.state_dict(),
        lambda net: under("model.", net),
        lambda net: under("module._orig_mod.", net),
        lambda net: {"state_dict": {**under("net.body.", net), "loss.weight": torch.ones(3)}, "epoch": 3},
        lambda net: {"model": net.state_dict(), "args": Namespace(lr=0.1), "folder": Path("runs")},
        lambda net: {"model": net.state_dict(), "criterion": nn.CrossEntropyLoss(weight=torch.ones(3))},
        lambda net: {name: w for name, w in net.state_dict().items() if "num_batches" not in name},
    ],
)
def test_state_dicts_of_many_programs_are_read(wrap: Any, tmp_path: Path) -> None:
    for seed in (1, 2):
        torch.save(wrap(network(seed)), tmp_path / f"{seed}.pt")
    assert_members_are(import_files(tmp_path / "run", [tmp_path / "1.pt", tmp_path / "2.pt"]), [1, 2])


def test_a_pattern_names_all_files_in_numeric_order(tmp_path: Path) -> None:
    for seed in (2, 10, 1):
        (tmp_path / f"seed{seed}").mkdir()
        safetensors.torch.save_file(network(seed).state_dict(), tmp_path / f"seed{seed}" / "w.safetensors")
    run = plateaux.import_weights(
        tmp_path / "run", recipe(3), [f"{tmp_path}/seed*/w.safetensors"], data=data(), model=small_net
    )
    assert_members_are(run, [1, 2, 10])
    with pytest.raises(RecipeError, match="No file matches"):
        import_files(tmp_path / "other", [f"{tmp_path}/*.ckpt"])
    with pytest.raises(RecipeError, match="3 weight files for 1 members"):
        import_files(tmp_path / "other", [f"{tmp_path}/seed*/w.safetensors"])


def test_names_are_mapped_and_left_out(tmp_path: Path) -> None:
    weights = network(1).state_dict()
    renamed = {name.replace("3.", "classifier."): tensor for name, tensor in weights.items()}
    torch.save({**renamed, "teacher.weight": torch.ones(2)}, tmp_path / "a.pt")
    with pytest.raises(RecipeError) as error:
        import_files(tmp_path / "run", [tmp_path / "a.pt"])
    message = str(error.value)
    assert "2 weights are missing: 3.weight, 3.bias." in message
    assert "--rename classifier.=3." in message
    with pytest.raises(RecipeError, match=r"--ignore teacher\.weight"):
        import_files(tmp_path / "run", [tmp_path / "a.pt"], names={"classifier.": "3."})
    assert not (tmp_path / "run").exists()
    names = {"classifier.": "3.", "teacher.": None}
    assert_members_are(import_files(tmp_path / "run", [tmp_path / "a.pt"], names=names), [1])


def test_names_that_do_not_occur_or_collide_are_errors(tmp_path: Path) -> None:
    torch.save(network(1).state_dict(), tmp_path / "a.pt")
    with pytest.raises(RecipeError, match=r"no weights that start with 'encoder\.'"):
        import_files(tmp_path / "run", [tmp_path / "a.pt"], names={"encoder.": "0."})
    with pytest.raises(RecipeError, match="two weights have the name"):
        import_files(tmp_path / "run", [tmp_path / "a.pt"], names={"0.": "3."})


def test_two_complete_models_in_a_file_are_not_guessed(tmp_path: Path) -> None:
    torch.save({**under("model.", network(1)), **under("ema.", network(2))}, tmp_path / "a.pt")
    with pytest.raises(RecipeError, match=r"2 models .* under 'ema', 'model': choose one, as in .*a.pt:ema"):
        import_files(tmp_path / "run", [tmp_path / "a.pt"])
    assert_members_are(import_files(tmp_path / "run", [f"{tmp_path}/a.pt:ema"]), [2])


class Payload:
    """An object whose unpickling creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.system, (f"touch {self.path}",))


class Opener(Payload):
    """The same without a shell."""

    def __reduce__(self) -> Any:
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize("name", ["evil.ckpt", "evil.pt", "evil.pth", "pytorch_model.bin"])
@pytest.mark.parametrize("kind", [Payload, Opener])
@pytest.mark.parametrize("where", ["state_dict", "hyper_parameters", "callbacks"])
@pytest.mark.parametrize("is_zip", [True, False])
def test_a_file_with_code_is_refused_and_executes_nothing(
    name: str, kind: type[Payload], where: str, is_zip: bool, tmp_path: Path
) -> None:
    trap = tmp_path / "executed"
    content = {"state_dict": network(1).state_dict(), "pytorch-lightning_version": "2.6.0", "epoch": 1}
    content[where] = {**content.get(where, {}), "extra": kind(trap)}  # type: ignore[dict-item]
    torch.save(content, tmp_path / name, _use_new_zipfile_serialization=is_zip)
    with pytest.raises(RecipeError, match=r"could run code when they are read|cannot be read as weights"):
        import_files(tmp_path / "run", [tmp_path / name])
    assert not trap.exists()
    assert not (tmp_path / "run").exists()
    if is_zip:  # the payload works: torch would execute it without weights_only
        torch.load(tmp_path / name, weights_only=False)
        assert trap.exists()


def test_skipped_types_cannot_call_what_they_are_named_after(tmp_path: Path) -> None:
    """A checkpoint that calls a skipped type with hostile arguments builds a stand-in."""
    content = b"".join(
        [pickle.PROTO, b"\x02", pickle.GLOBAL, b"pathlib\nPosixPath\n", pickle.BINUNICODE, b"\x01\0\0\0x"]
    )
    content += pickle.TUPLE1 + pickle.REDUCE + pickle.EMPTY_DICT + pickle.BUILD + pickle.STOP
    torch.save({}, tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as old, zipfile.ZipFile(tmp_path / "b.pt", "w") as new:
        for item in old.namelist():
            new.writestr(item, content if item.endswith("data.pkl") else old.read(item))
    before = set(torch.serialization.get_safe_globals())
    assert isinstance(read_checkpoint(tmp_path / "b.pt"), Skipped)
    assert set(torch.serialization.get_safe_globals()) == before


def test_weights_that_give_nan_are_refused(tmp_path: Path) -> None:
    weights = network(1).state_dict()
    weights["0.weight"][0, 0] = float("nan")
    torch.save(weights, tmp_path / "a.pt")
    with pytest.raises(RecipeError, match="returned NaN or infinity"):
        import_files(tmp_path / "run", [tmp_path / "a.pt"])
    assert not (tmp_path / "run").exists()


def test_a_model_that_cannot_process_the_data_is_refused(tmp_path: Path) -> None:
    def broken(*, classes: int) -> nn.Module:
        return nn.Linear(5, classes)

    torch.save(broken(classes=3).state_dict(), tmp_path / "a.pt")
    with pytest.raises(RecipeError, match="cannot process two samples of 'arrays'"):
        plateaux.import_weights(tmp_path / "run", recipe(1), [tmp_path / "a.pt"], data=data(), model=broken)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    for name, text in (("plain", "folder without config.json: give"), ("sharded.ckpt", "consolidate_checkpoint")):
        (tmp_path / name).mkdir()
        with pytest.raises(RecipeError, match=text):
            import_files(tmp_path / "run", [tmp_path / name])
    with pytest.raises(RecipeError, match="no weights file at"):
        import_files(tmp_path / "run", [tmp_path / "nothing.ckpt"])


def test_the_command_imports_a_pattern_with_renamed_entries(tmp_path: Path) -> None:
    stored = import_files(tmp_path / "first", _saved(tmp_path, (1, 2, 3)))
    assert (tmp_path / "first" / "data.safetensors").is_file()
    words = ["import-weights", "-o", f"{tmp_path}/run", "--model", "checkpoint_networks:small_net", "--data", "arrays"]
    words += ["--set", "data.path=data.safetensors", "--set", f"data.root='{tmp_path}/first'"]
    words += [
        "--weights",
        f"{tmp_path}/*.pt",
        "--rename",
        "head.=3.",
        "--ignore",
        "old.",
        "--trust",
        "checkpoint_networks",
    ]
    for file in tmp_path.glob("*.pt"):
        weights = torch.load(file)
        renamed = {name.replace("3.", "head."): tensor for name, tensor in weights.items()}
        torch.save({**renamed, "old.scale": torch.ones(1)}, file)
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    run = plateaux.Run.open(tmp_path / "run")
    for number in range(3):
        assert all(torch.equal(run.weights(number)[n], w) for n, w in stored.weights(number).items())
    for command in (["evaluate"], ["calibrate", "--split", "test"], ["calibrate", "--split", "test", "--cascade"]):
        ended = CliRunner().invoke(app, [command[0], str(run), *command[1:], "--trust", "checkpoint_networks"])
        assert ended.exit_code == 0, ended.output
    result = CliRunner().invoke(app, [*words, "--rename", "head"])
    assert result.exit_code == 2
    assert "write OLD=NEW" in result.output


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.complex64])
def test_weights_of_another_kind_of_numbers_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    weights = network(0).state_dict()
    torch.save({**weights, "0.weight": weights["0.weight"].to(dtype)}, tmp_path / "a.pt")
    with pytest.raises(RecipeError, match="have another shape or kind of numbers"):
        import_files(tmp_path / "run", [tmp_path / "a.pt"])
    torch.save({name: tensor.half() for name, tensor in weights.items()}, tmp_path / "b.pt")
    assert import_files(tmp_path / "run", [tmp_path / "b.pt"]).weights(0)["0.weight"].dtype == torch.float32


def _saved(folder: Path, seeds: tuple[int, ...]) -> list[Path]:
    for seed in seeds:
        torch.save(network(seed).state_dict(), folder / f"{seed}.pt")
    return [folder / f"{seed}.pt" for seed in seeds]
