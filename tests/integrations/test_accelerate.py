"""SAM with the real Accelerator equals a loop of our own bit for bit."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from plateaux.core.errors import TrainingLoopError
from plateaux.core.imports import optional_import
from plateaux.optim import SharpnessAware

if find_spec("accelerate") is None:
    pytest.skip("accelerate is not installed", allow_module_level=True)
accelerate = optional_import("accelerate", extra="accelerate")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))


def batches() -> DataLoader[Any]:
    x = torch.randn(48, 4, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=8)


def sam(net: nn.Module) -> SharpnessAware:
    return SharpnessAware(torch.optim.AdamW(net.parameters(), lr=0.01), rho=0.2, model=net)


@pytest.fixture
def accelerator(request: pytest.FixtureRequest) -> Any:
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    yield accelerate.Accelerator(cpu=True, **getattr(request, "param", {}))
    AcceleratorState._reset_state(reset_partial_state=True)


def custom_loop(*, micro_batches: int = 1, bf16: bool = False) -> nn.Module:
    net = network()
    optimizer = sam(net)
    torch.manual_seed(3)
    for index, (x, y) in enumerate(batches()):

        def backward(x: Tensor = x, y: Tensor = y) -> None:
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                outputs = net(x)
            (F.cross_entropy(outputs.float(), y) / micro_batches).backward()

        backward()
        with optimizer.perturbed():
            backward()
        if (index + 1) % micro_batches == 0:
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return net


SETTINGS = [{}, {"gradient_accumulation_steps": 2}, {"mixed_precision": "bf16"}]


@pytest.mark.parametrize(
    ("accelerator", "options"),
    [(setting, setting) for setting in SETTINGS],
    ids=["", "accum", "bf16"],
    indirect=["accelerator"],
)
def test_accelerate_equals_a_custom_loop(accelerator: Any, options: dict[str, Any]) -> None:
    net = network()
    sharpness_aware = sam(net)
    model, optimizer, loader = accelerator.prepare(net, sharpness_aware, batches())
    torch.manual_seed(3)
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(x), y))
            with sharpness_aware.perturbed():
                accelerator.backward(F.cross_entropy(model(x), y))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    expected = custom_loop(
        micro_batches=options.get("gradient_accumulation_steps", 1), bf16="mixed_precision" in options
    )
    for name, value in net.state_dict().items():
        assert torch.equal(value, expected.state_dict()[name]), name
    assert not torch.equal(net[0].weight, network()[0].weight)


def test_pitfall_accelerate_without_a_perturbed_pass_would_be_plain_descent(accelerator: Any) -> None:
    net = network()
    model, optimizer, loader = accelerator.prepare(net, sam(net), batches())
    x, y = next(iter(loader))
    accelerator.backward(F.cross_entropy(model(x), y))
    with pytest.raises(TrainingLoopError, match="without a gradient at perturbed weights"):
        optimizer.step()
