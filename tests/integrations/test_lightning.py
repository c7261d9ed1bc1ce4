"""SAM in the real Trainer of Lightning equals a loop of our own bit for bit; unsupported settings are errors."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from plateaux.core.errors import TrainingLoopError
from plateaux.core.imports import optional_import
from plateaux.optim import SharpnessAware

if find_spec("lightning") is None:
    pytest.skip("lightning is not installed", allow_module_level=True)
lightning = optional_import("lightning.pytorch", extra="lightning")


@pytest.fixture(autouse=True)
def no_warnings_of_lightning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))


def batches() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(48, 4, generator=generator)
    return DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=8)


def sam(net: nn.Module, **options: Any) -> SharpnessAware:
    return SharpnessAware(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), rho=0.2, model=net, **options)


class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
    """The network with SAM, in automatic optimization."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.seen: list[tuple[Tensor, Tensor]] = []  # the inputs and the random state of every forward pass

    def training_step(self, batch: Any, _: int) -> Tensor:
        x, y = batch
        self.seen.append((x.clone(), torch.get_rng_state()))
        return F.cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> Any:
        optimizer = sam(self.net)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5), "interval": "step"}]


class ManualModule(Module):
    """The network with SAM, in manual optimization, with clipping and two micro-batches per step if asked."""

    def __init__(self, net: nn.Module, micro_batches: int = 1) -> None:
        super().__init__(net)
        self.automatic_optimization = False
        self.micro_batches = micro_batches

    def training_step(self, batch: Any, index: int) -> None:
        optimizer = self.optimizers()
        if index % self.micro_batches == 0:
            optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, index) / self.micro_batches)
        with optimizer.perturbed():
            self.manual_backward(super().training_step(batch, index) / self.micro_batches)
        if (index + 1) % self.micro_batches == 0:
            nn.utils.clip_grad_norm_(self.net.parameters(), 0.5)
            optimizer.step()
            self.lr_schedulers().step()


def trainer(**options: Any) -> Any:
    return lightning.Trainer(
        accelerator="cpu",
        devices=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=False,
        **{"max_epochs": 2, **options},
    )


def fit(module: Any, **options: Any) -> Any:
    used = trainer(**options)
    used.fit(module, batches())
    return used


def custom_loop(
    seen: list[tuple[Tensor, Tensor]], *, clip: float = 0.0, bf16: bool = False, micro_batches: int = 1
) -> nn.Module:
    """Train on the batches and random states that a module saw, two passes each."""
    net = network()
    optimizer = sam(net)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    first_passes = seen[::2]
    assert len(first_passes) == 12
    for start in range(0, 12, micro_batches):
        optimizer.zero_grad()
        for x, rng in first_passes[start : start + micro_batches]:
            torch.set_rng_state(rng)

            def backward(x: Tensor = x) -> None:
                with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                    loss = F.cross_entropy(net(x), x[:, :3].argmax(1))
                (loss / micro_batches).backward()

            backward()
            with optimizer.perturbed():
                backward()
        if clip:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
        scheduler.step()
    return net


def equal(a: nn.Module, b: nn.Module) -> bool:
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_automatic_optimization_equals_a_custom_loop(precision: str) -> None:
    module = Module(network())
    fit(module, precision=precision)
    assert len(module.seen) == 24  # two passes for each of 12 batches
    assert torch.equal(module.seen[0][0], module.seen[1][0])
    assert equal(module.net, custom_loop(module.seen, bf16=precision == "bf16-mixed"))
    assert not equal(module.net, network())


def test_clipping_by_lightning_equals_clipping_the_second_gradient() -> None:
    module = Module(network())
    fit(module, gradient_clip_val=0.5)
    expected = custom_loop(module.seen, clip=0.5)
    for name, value in module.net.state_dict().items():
        # Lightning also clips the first gradient, which changes its direction by rounding errors only.
        torch.testing.assert_close(value, expected.state_dict()[name], rtol=0, atol=1e-5)
    assert not equal(expected, custom_loop(module.seen))


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_manual_optimization_equals_a_custom_loop(micro_batches: int) -> None:
    module = ManualModule(network(), micro_batches)
    fit(module)
    assert equal(module.net, custom_loop(module.seen, clip=0.5, micro_batches=micro_batches))


def test_pitfall_momentum_lost_on_resume_in_lightning(tmp_path: Path) -> None:
    def without_dropout() -> Module:
        net = network()
        net[3] = nn.Identity()
        return Module(net)

    whole, half, resumed = without_dropout(), without_dropout(), without_dropout()
    fit(whole)
    fit(half, max_epochs=1).save_checkpoint(tmp_path / "half.ckpt")
    trainer(max_epochs=2).fit(resumed, batches(), ckpt_path=str(tmp_path / "half.ckpt"))
    assert len(resumed.seen) == 12
    assert equal(resumed.net, whole.net)


def test_pitfall_accumulation_in_lightning_would_disable_sam() -> None:
    module = Module(network())
    with pytest.raises(TrainingLoopError, match="set accumulate_grad_batches = 1, or use manual") as error:
        fit(module, accumulate_grad_batches=2)
    assert "\n" not in str(error.value)


def test_pitfall_16_mixed_in_lightning_would_disable_sam() -> None:
    from lightning.pytorch.plugins import MixedPrecision

    module = Module(network())
    before = copy.deepcopy(module.net)
    plugin = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=4.0))
    with pytest.raises(TrainingLoopError, match="Lightning with 16-mixed precision: use bf16-mixed") as error:
        fit(module, plugins=[plugin])
    assert "\n" not in str(error.value)
    assert all(torch.equal(a, b) for a, b in zip(module.net.parameters(), before.parameters(), strict=True))


def test_the_lightning_module_itself_is_not_the_module_that_is_called() -> None:
    class Whole(Module):
        def configure_optimizers(self) -> Any:
            return sam(self)

    with pytest.raises(TrainingLoopError, match="the module that you call"):
        fit(Whole(network()))
