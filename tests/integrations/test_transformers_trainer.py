"""SAM in the real Trainer of transformers equals a loop of our own bit for bit."""

from __future__ import annotations

import copy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plateaux.core.errors import TrainingLoopError
from plateaux.core.imports import optional_import
from plateaux.integrations.transformers_trainer import SharpnessAwareMixin
from plateaux.optim import SharpnessAware

if find_spec("transformers") is None:
    pytest.skip("transformers is not installed", allow_module_level=True)
transformers = optional_import("transformers", extra="text")


def tiny_bert() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=20,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=8,
        num_labels=2,
    )
    return transformers.BertForSequenceClassification(config)  # type: ignore[no-any-return]


def sentences(count: int = 24) -> list[dict[str, Tensor]]:
    tokens = torch.randint(20, (count, 6), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row[0] % 2} for row in tokens]


class Recording(transformers.Trainer):  # type: ignore[misc, name-defined]
    """A Trainer that records its batches and the random state before each."""

    seen: list[tuple[Any, Tensor]]

    def training_step(self, model: Any, inputs: Any, *args: Any) -> Tensor:
        self.__dict__.setdefault("seen", []).append((dict(inputs), torch.get_rng_state()))
        return super().training_step(model, inputs, *args)  # type: ignore[no-any-return]


class SamTrainer(SharpnessAwareMixin, Recording):
    rho = 0.2


def arguments(folder: Path, **options: Any) -> Any:
    return transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        num_train_epochs=2,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        **{"save_strategy": "no", **options},
    )


def weights_of(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 3}, {"bf16": True}], ids=["", "accum", "bf16"])
def test_the_trainer_with_the_mixin_equals_a_custom_loop(options: dict[str, Any], tmp_path: Path) -> None:
    model = tiny_bert()
    other = copy.deepcopy(model)
    trainer = SamTrainer(model=model, args=arguments(tmp_path, **options), train_dataset=sentences())
    trainer.model_accepts_loss_kwargs = False  # divide losses by the number of micro-batches
    trainer.train()
    seen = trainer.seen[::2]  # the first of the two passes
    assert len(seen) == 12
    micro_batches = options.get("gradient_accumulation_steps", 1)
    names = {name for name, _ in other.named_parameters() if not name.endswith("bias") and "LayerNorm" not in name}
    groups = [
        {"params": [p for n, p in other.named_parameters() if n in names], "weight_decay": 0.0},
        {"params": [p for n, p in other.named_parameters() if n not in names], "weight_decay": 0.0},
    ]
    optimizer = SharpnessAware(torch.optim.AdamW(groups, lr=1e-2, fused=True), rho=0.2, model=other.train())
    for step in range(0, 12, micro_batches):
        for batch, rng in seen[step : step + micro_batches]:
            torch.set_rng_state(rng)

            def backward(batch: Any = batch) -> None:
                with torch.autocast("cpu", torch.bfloat16, enabled="bf16" in options):
                    loss = other(**batch).loss
                (loss / micro_batches).backward()

            backward()
            with optimizer.perturbed():
                backward()
        nn.utils.clip_grad_norm_(other.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert equal(weights_of(model), weights_of(other))
    assert not equal(weights_of(model), weights_of(tiny_bert()))


def test_sam_in_the_trainer_differs_from_training_without_it(tmp_path: Path) -> None:
    results = []
    for kind in (Recording, SamTrainer):
        model = tiny_bert()
        kind(model=model, args=arguments(tmp_path), train_dataset=sentences()).train()
        results.append(weights_of(model))
    assert not equal(*results)


def test_pitfall_the_plain_trainer_would_be_plain_descent(tmp_path: Path) -> None:
    model = tiny_bert()
    before = weights_of(model)
    optimizer = SharpnessAware(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.1, model=model)
    trainer = transformers.Trainer(
        model=model, args=arguments(tmp_path), train_dataset=sentences(), optimizers=(optimizer, None)
    )
    with pytest.raises(TrainingLoopError, match="Hugging Face Trainer: use SharpnessAwareMixin") as error:
        trainer.train()
    assert "\n" not in str(error.value)
    assert equal(weights_of(model), before)


def test_pitfall_the_mixin_after_the_trainer_would_have_no_effect() -> None:
    class Plain(transformers.Trainer):  # type: ignore[misc]
        pass

    for bases in ((transformers.Trainer, SharpnessAwareMixin), (Plain, SharpnessAwareMixin)):
        with pytest.raises(TrainingLoopError, match=r"write class Wrong\(SharpnessAwareMixin, Trainer\)"):
            type("Wrong", bases, {})
    right = type("Right", (SharpnessAwareMixin, Plain), {})
    assert issubclass(type("Below", (right,), {}), transformers.Trainer)


def test_an_optimizer_of_your_own_is_wrapped_once(tmp_path: Path) -> None:
    results = []
    for wraps in (False, True):
        model = tiny_bert()
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if wraps:
            optimizer = SharpnessAware(optimizer, rho=0.2, model=model)
        trainer = SamTrainer(
            model=model, args=arguments(tmp_path), train_dataset=sentences(), optimizers=(optimizer, None)
        )
        trainer.train()
        results.append(weights_of(model))
        assert len(model._forward_pre_hooks) == 1
    assert equal(*results)


def test_pitfall_momentum_lost_on_resume_of_the_trainer(tmp_path: Path) -> None:
    """An interrupted and resumed training equals an uninterrupted one, also with the state of AdamW."""
    whole = tiny_bert()
    SamTrainer(
        model=whole, args=arguments(tmp_path / "whole", save_strategy="epoch"), train_dataset=sentences()
    ).train()
    resumed = tiny_bert()
    trainer = SamTrainer(model=resumed, args=arguments(tmp_path / "resumed"), train_dataset=sentences())
    trainer.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-6"))
    assert len(trainer.seen) == 12  # two passes for each of the last six steps
    assert equal(weights_of(resumed), weights_of(whole))
