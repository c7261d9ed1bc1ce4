"""Checks that hold for every network of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap


def tokens(vocabulary: int, count: int = 4, *, length: int = 12) -> dict[str, Tensor]:
    """Return pairs of sentences of different lengths."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(4, vocabulary, (count, length), generator=generator)
    place, ends = torch.arange(length), torch.arange(count)[:, None] % 4 + 8
    mask = (place < ends).long()
    return {"input_ids": ids * mask, "attention_mask": mask, "token_type_ids": (place >= 4).long() * mask}


def check_padding(network: nn.Module, x: Mapping[str, Tensor], *, length: int) -> None:
    """Check that padding does not change the output. The first sample has `length` tokens."""
    assert int(x["attention_mask"][0].sum()) == length < x["attention_mask"].shape[1]
    other = {**x, "input_ids": torch.where(x["attention_mask"] == 1, x["input_ids"], 7)}
    short = {name: rows[:1, :length] for name, rows in x.items()}
    with torch.no_grad():
        torch.testing.assert_close(network(**other), network(**x), rtol=0, atol=1e-6)
        torch.testing.assert_close(network(**short), network(**x)[:1], rtol=0, atol=1e-6)


def check_vmap(networks: Sequence[nn.Module], x: Mapping[str, Tensor]) -> None:
    """Check that vmap over two networks and two batches equals a loop."""
    networks = [network.double().eval() for network in networks]
    batches = [x, {name: rows.flip(0) for name, rows in x.items()}]
    both = {name: torch.stack([each[name] for each in batches]) for name in x}
    params, buffers = stack_module_state(networks)  # type: ignore[arg-type]
    with torch.no_grad():
        table = vmap(lambda p, b, inputs: functional_call(networks[0], (p, b), kwargs=inputs))(params, buffers, both)
        loop = torch.stack([network(**inputs) for network, inputs in zip(networks, batches, strict=True)])
    torch.testing.assert_close(table, loop, rtol=0, atol=1e-12)
