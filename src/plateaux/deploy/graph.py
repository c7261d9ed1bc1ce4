"""The graph of an ensemble for export: from prepared inputs to all answers, in float32, for any number of inputs.

Members run in a loop, because `torch.export` cannot export vmap with a dynamic batch. A shared backbone runs once. Its
heads, if they are linear layers or small MLPs of one shape, are one batched product per layer: 200 heads as a loop take
four times as long to export and almost twice as long to run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from plateaux.core.types import Inputs
from plateaux.data.augment import normalize
from plateaux.ensembles.answers import Answers, AnswerSettings
from plateaux.ensembles.cascade import stage_confidence
from plateaux.ensembles.ensemble import Ensemble
from plateaux.models.backbone import Backbone, BackboneWithHead, common_backbone

ACTIVATIONS = (nn.ReLU, nn.GELU, nn.Tanh, nn.SiLU)
IN_EVALUATION_IDENTITY = (nn.Identity, nn.Dropout)


class AnswerGraph(nn.Module):
    """Normalization, members, and `Answers` in float32, as one module whose forward pass takes inputs by position."""

    def __init__(self, ensemble: Ensemble, settings: AnswerSettings, names: Sequence[str]) -> None:
        super().__init__()
        self.mean, self.std, self.names = ensemble.mean, ensemble.std, tuple(names)
        members = list(ensemble.members)
        backbone = common_backbone(members)
        self.members: nn.Module = _Loop(members) if backbone is None else SharedBackbone(backbone, _heads(members))
        self.answers = Answers(settings, torch.float32)
        self.eval()

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        answers: tuple[Tensor, ...] = self.answers(self.member_logits(*inputs))
        return answers

    def member_logits(self, *inputs: Tensor) -> Tensor:
        """Return the logits of the members of this graph `[M, B, C]`."""
        x: Inputs = dict(zip(self.names, inputs, strict=True))
        if self.names == ("x",):
            x = normalize(inputs[0], self.mean, self.std, torch.float32)
        logits: Tensor = self.members(x)
        return logits


class StageGraph(AnswerGraph):
    """One stage of a cascade: its own members, and the answers of all members up to them.

    Inputs are those of the ensemble and, after the first stage, the logits `[B, k, C]` of the members before. Outputs
    are the answers and, before the last stage, the logits of all members so far and the confidence of the stage.
    """

    def __init__(
        self, ensemble: Ensemble, settings: AnswerSettings, names: Sequence[str], begin: int, end: int, classes: int
    ) -> None:
        members = Ensemble(list(ensemble.members)[begin:end], mean=ensemble.mean, std=ensemble.std)
        super().__init__(members, settings, names)
        self.begin, self.is_last, self.classes = begin, end == len(ensemble), classes

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        logits = self.member_logits(*(inputs[:-1] if self.begin else inputs))
        if self.begin:
            logits = torch.cat([inputs[-1].transpose(0, 1), logits])
        answers: tuple[Tensor, ...] = self.answers(logits)
        return answers if self.is_last else (*answers, logits.transpose(0, 1), stage_confidence(logits))


class BatchedLinear(nn.Module):
    """The same linear layer of all members as one batched product: `[B, D]` or `[M, B, D]` to `[M, B, C]`."""

    weight: Tensor  # [M, D, C]
    bias: Tensor  # [M, 1, C]

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.register_buffer("weight", torch.stack([layer.weight.detach().mT for layer in layers]).contiguous())
        zeros = layers[0].weight.new_zeros(layers[0].out_features)
        biases = [zeros if layer.bias is None else layer.bias.detach() for layer in layers]
        self.register_buffer("bias", torch.stack(biases)[:, None])

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 2:
            x = x.expand(len(self.weight), *x.shape)
        return torch.baddbmm(self.bias, x, self.weight)


class _Loop(nn.Module):
    """The logits of members, one after the other: `[M, B, C]`."""

    def __init__(self, members: Sequence[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)

    def forward(self, x: Inputs) -> Tensor:
        outputs = [member(x) if isinstance(x, Tensor) else member(**x) for member in self.members]
        return torch.stack([output if isinstance(output, Tensor) else output.logits for output in outputs])


class SharedBackbone(nn.Module):
    """A backbone that runs once for all heads.

    A backbone ends its forward pass with an exception (`_run_until`), which breaks the records that `torch.export`
    keeps of nested modules. Modules that are not registered have no such records. The backbone is therefore hidden in
    a tuple, and its tensors are registered here.
    """

    def __init__(self, backbone: Backbone, heads: nn.Module) -> None:
        super().__init__()
        self._hidden = (backbone,)
        self.heads = heads
        self._names: dict[str, str] = {}  # of the tensors of the backbone, by the names they are registered with
        for number, (name, tensor) in enumerate(_tensors(backbone).items()):
            self._names[f"backbone_{number}"] = name
            self.register_buffer(f"backbone_{number}", tensor)

    def forward(self, x: Inputs) -> Tensor:
        tensors = {name: getattr(self, registered) for registered, name in self._names.items()}
        args, kwargs = ((x,), {}) if isinstance(x, Tensor) else ((), dict(x))
        logits: Tensor = self.heads(functional_call(self._hidden[0], tensors, args, kwargs))
        return logits


def _tensors(module: nn.Module) -> Mapping[str, Tensor]:
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: tensor.detach() for name, tensor in named}


def _heads(members: Sequence[nn.Module]) -> nn.Module:
    """Return all heads as batched products, or as a loop if they have other layers or different shapes."""
    heads = [member.head for member in members if isinstance(member, BackboneWithHead)]
    parts = [_flat_layers(head) for head in heads]
    if any(part is None or len(part) != len(parts[0] or ()) for part in parts):
        return _Loop(heads)
    rows: list[tuple[Any, ...]] = list(zip(*[part for part in parts if part is not None], strict=True))
    if not all(_is_uniform(layers) for layers in rows):
        return _Loop(heads)
    batched = [BatchedLinear(layers) if isinstance(layers[0], nn.Linear) else layers[0] for layers in rows]
    return nn.Sequential(nn.Flatten(), *batched)


def _flat_layers(head: nn.Module) -> list[nn.Module] | None:
    """Return the layers of a head that takes `[B, D]`: linear layers and activations; None: it has others."""
    layers = list(head) if isinstance(head, nn.Sequential) else [head]
    if layers and isinstance(layers[0], nn.Flatten) and (layers[0].start_dim, layers[0].end_dim) == (1, -1):
        layers = layers[1:]
    layers = [layer for layer in layers if not isinstance(layer, IN_EVALUATION_IDENTITY)]
    is_plain = all(type(layer) is nn.Linear or isinstance(layer, ACTIVATIONS) for layer in layers)
    return layers if is_plain and any(isinstance(layer, nn.Linear) for layer in layers) else None


def _is_uniform(layers: Sequence[nn.Module]) -> bool:
    """Return whether the same layer of all heads is equal up to its weights."""
    return len({(type(layer), repr(layer)) for layer in layers}) == 1
