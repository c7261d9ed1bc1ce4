"""Checkpoints that Lightning's own Trainer wrote become an ensemble."""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_networks import small_net
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from typer.testing import CliRunner

import plateaux
from plateaux.cli.main import app
from plateaux.core.errors import RecipeError
from plateaux.core.imports import optional_import
from plateaux.integrations.lightning_checkpoints import read_lightning_checkpoint

lightning: Any = optional_import("lightning.pytorch", extra="lightning")
SEEDS = (0, 1, 2)
QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}


class Setting:
    """A hyperparameter of a class of the user."""


class Classifier(lightning.LightningModule):  # type: ignore[misc]
    """A classifier with its network as an attribute, a loss with weights, and hyperparameters."""

    def __init__(self, width: int = 4, extra: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = small_net(shape=(2,), classes=3, width=width)
        self.loss = nn.CrossEntropyLoss(weight=torch.ones(3))

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        loss: torch.Tensor = self.loss(self.net(batch[0]), batch[1])
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2)]


def data() -> plateaux.DataSplits:
    """Return three blobs; the networks are trained on raw inputs, so nothing is standardized."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 400)
    return plateaux.from_arrays(rng.normal(size=(400, 2)) + 2 * y[:, None], y, standardize=False, test=0.5)


def train(folder: Path, seed: int, **options: Any) -> Classifier:
    """Train one network with Lightning, which writes `last.ckpt`."""
    lightning.seed_everything(seed, verbose=False)
    module = Classifier(**options)
    x, y = data().train.fetch(torch.arange(200))
    assert isinstance(x, torch.Tensor)
    callbacks = [lightning.callbacks.ModelCheckpoint(dirpath=folder, save_last=True)]
    trainer = lightning.Trainer(max_epochs=2, callbacks=callbacks, default_root_dir=folder, **QUIET)
    trainer.fit(module, DataLoader(TensorDataset(x, y), 32))
    return module.eval()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Classifier]]:
    """Return a folder with three checkpoints, `seed<i>/last.ckpt`, and the trained modules."""
    folder = tmp_path_factory.mktemp("seeds")
    return folder, [train(folder / f"seed{seed}", seed, extra=Path("data")) for seed in SEEDS]


def recipe(members: int = len(SEEDS)) -> plateaux.Recipe:
    tree = {"data": {"name": "arrays", "path": "data.safetensors"}, "model": {"name": "checkpoint_networks:small_net"}}
    return plateaux.Recipe.from_dict({"members": members, **tree})


@pytest.mark.slow
def test_three_lightning_checkpoints_are_evaluated_calibrated_cascaded_exported_and_served(
    checkpoints: tuple[Path, list[Classifier]], tmp_path: Path
) -> None:
    folder, modules = checkpoints
    trust, pattern, splits = ["checkpoint_networks"], f"{folder}/*/last.ckpt", data()
    run = plateaux.import_weights(tmp_path / "run", recipe(), [pattern], data=splits, trust=trust)
    x, y = splits.test.fetch(torch.arange(len(splits.test)))
    assert isinstance(x, torch.Tensor)
    with torch.no_grad():
        logits = torch.stack([module.net(x) for module in modules])
    probabilities = logits.softmax(2).mean(0)
    torch.testing.assert_close(
        plateaux.load_predictor(plateaux.open_run(run, trust=trust)).ensemble.predict(x), probabilities
    )
    accuracy = plateaux.evaluate(plateaux.open_run(run, trust=trust), metrics="accuracy")["accuracy"].ensemble
    assert accuracy.value == pytest.approx(float((probabilities.argmax(1) == y).double().mean()))
    cascade = {"max_harm": 0.2, "confidence": 0.5}
    calibration = plateaux.calibrate(plateaux.open_run(run, trust=trust), split="test", cascade=cascade)
    assert calibration.cascade is not None
    bundle = plateaux.export(plateaux.open_run(run, trust=trust), tmp_path / "bundle")
    assert len(bundle.manifest.members) == 3
    served = asyncio.run(_ask(tmp_path / "bundle", x[:1]))
    assert served == int(probabilities[0].argmax())


async def _ask(bundle: Path, x: torch.Tensor) -> int:
    """Return the label that the service of a bundle gives for one input."""
    from plateaux.serving.app import create_app
    from plateaux.serving.settings import ServeSettings

    tensor = {"name": "x", "shape": list(x.shape), "datatype": "FP32", "data": x.flatten().tolist()}
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": json.dumps({"inputs": [tensor]}).encode(), "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    path = "/v2/models/model/infer"
    scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b"", "root_path": ""}
    service = create_app(ServeSettings(bundle=str(bundle), max_batch=4))
    async with service.router.lifespan_context(service):
        await service({**scope, "http_version": "1.1"}, receive, send)
    outputs = json.loads(sent[1]["body"])["outputs"]
    return int(next(output["data"][0] for output in outputs if output["name"] == "label"))


def test_one_command_makes_the_same_ensemble(checkpoints: tuple[Path, list[Classifier]], tmp_path: Path) -> None:
    folder, modules = checkpoints
    plateaux.fit(data(), model="mlp", members=1, epochs=1, out=tmp_path / "other")  # its folder contains the data
    words = ["import-weights", "-o", f"{tmp_path}/run", "--weights", f"{folder}/*/last.ckpt"]
    words += ["--model", "checkpoint_networks:small_net", "--trust", "checkpoint_networks", "--data", "arrays"]
    words += ["--set", "data.path=data.safetensors", "--set", f"data.root='{tmp_path}/other'"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "removed the prefix 'net.'; not used: loss.weight" in result.output.replace("\n", "")
    run = plateaux.Run.open(tmp_path / "run")
    assert run.info.imported_from == ("last.ckpt",) * 3
    for number, module in enumerate(modules):
        weights = module.net.state_dict()
        assert all(torch.equal(run.weights(number)[name], weights[name]) for name in weights)


@pytest.mark.parametrize(
    "extra", [argparse.Namespace(a=1), Path("x"), torch.device("cpu"), nn.ReLU(), [1, {"a": (1, 2)}]], ids=type
)
@pytest.mark.filterwarnings("ignore:Attribute 'extra' is an instance of `nn.Module`")
def test_hyperparameters_of_plain_types_are_skipped(extra: Any, tmp_path: Path) -> None:
    module = train(tmp_path, 0, extra=extra)
    weights = read_lightning_checkpoint(tmp_path / "last.ckpt")
    assert all(torch.equal(weights[name], tensor) for name, tensor in module.state_dict().items())


def test_hyperparameters_of_own_classes_are_refused_with_what_to_do(tmp_path: Path) -> None:
    train(tmp_path, 0, extra=Setting())
    with pytest.raises(RecipeError) as error:
        read_lightning_checkpoint(tmp_path / "last.ckpt")
    message = str(error.value)
    assert "Setting" in message
    assert "self.save_hyperparameters(ignore=[...])" in message
    assert "weights_only=False" not in message  # it runs code in the file


def test_a_checkpoint_without_weights_is_refused(tmp_path: Path) -> None:
    torch.save({"epoch": 3}, tmp_path / "a.ckpt")
    with pytest.raises(RecipeError, match=r"no state_dict; it contains \['epoch'\]"):
        read_lightning_checkpoint(tmp_path / "a.ckpt")
