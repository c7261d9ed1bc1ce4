"""Squared gradient norms equal those of a loop over samples, for every layer, option and network."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from reference.gradient_norms import gradient_norms
from torch import Tensor, nn

from plateaux.core.member import MemberModule
from plateaux.core.registry import model
from plateaux.core.types import Batch
from plateaux.models.pruning import prune
from plateaux.models.surgery import freeze
from plateaux.optim import grad_norms
from plateaux.optim.grad_norms import max_batch_size, squared_norms
from plateaux.optim.losses import cross_entropy


@pytest.fixture(autouse=True)
def _fail_if_slow() -> Iterator[None]:
    """Fail tests in which a layer is handled sample by sample, unless they expect the warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Per-sample gradient norms are slow")
        yield


def shaken(module: nn.Module) -> nn.Module:
    """Randomize statistics, scales, and shifts, as after training, and set evaluation mode."""
    with torch.no_grad():
        for part in module.modules():
            if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.running_mean is not None:
                part.running_mean.normal_(0, 0.3)
                part.running_var.uniform_(0.5, 2.0)
            for parameter in part.parameters(recurse=False):
                if parameter.ndim == 1 or len(parameter) == 1:
                    parameter.add_(0.2 * torch.randn_like(parameter))
    return module.eval()


def batch_of(x: Tensor, classes: int) -> Batch:
    return Batch(x, torch.arange(len(x)) % classes, torch.arange(len(x)))


def off(found: Tensor, truth: Tensor) -> float:
    """Return the largest error, each relative to its score or, if that is larger, to the median score."""
    assert found.dtype == torch.float64
    assert found.shape == truth.shape
    return float(((found - truth).abs() / truth.clamp(min=float(truth.median()))).max())


def check(module: nn.Module, x: Tensor, classes: int = 5) -> None:
    """Hold both precisions against the loop in float64."""
    for dtype, most in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        module.to(dtype)
        inputs = x.to(dtype) if x.is_floating_point() else x
        found = squared_norms(MemberModule(module), batch_of(inputs, classes))
        wide = x.double() if x.is_floating_point() else x
        truth = gradient_norms(module.double(), batch_of(wide, classes))
        assert float(truth.min()) > 0
        assert off(found, truth) < most, dtype


def built(name: str, pixels: int = 32, **options: object) -> nn.Module:
    return shaken(model.get(name)(shape=(3, pixels, pixels), classes=5, **options))


NETWORKS = {
    "resnet18": lambda: built("resnet18", width=16),
    "resnet8": lambda: built("resnet8"),
    "wrn": lambda: built("wrn", depth=40, widen_factor=2),
    "vgg19_bn": lambda: built("vgg19_bn", width=8),
    "vit": lambda: built("vit", depth=2, width=48),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_norms_of_a_network_equal_one_backward_pass_per_sample(name: str) -> None:
    check(NETWORKS[name](), torch.randn(3, 3, 32, 32))


@pytest.mark.slow
def test_norms_of_the_wide_resnet18_equal_one_backward_pass_per_sample() -> None:
    module, x = built("resnet18", width=64), torch.randn(2, 3, 32, 32)
    found = squared_norms(MemberModule(module), batch_of(x, 5))
    assert off(found, gradient_norms(module.double(), batch_of(x.double(), 5))) < 1e-5


@pytest.mark.slow
@pytest.mark.skipif(find_spec("timm") is None, reason="needs timm")
def test_norms_of_a_timm_transformer_equal_one_backward_pass_per_sample() -> None:
    check(built("timm:vit_tiny_patch16_224"), torch.randn(3, 3, 32, 32))


def test_pruned_weights_do_not_count() -> None:
    module = built("resnet8")
    dense = squared_norms(MemberModule(module), batch_of(torch.randn(3, 3, 32, 32), 5))
    prune(module, 0.7)
    check(module, torch.randn(3, 3, 32, 32))
    assert dense.shape == (3,)


CONVOLUTIONS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "conv1d": (lambda: nn.Conv1d(3, 4, 3), (3, 11)),
    "conv1d, every option": (
        lambda: nn.Conv1d(4, 6, 4, stride=2, padding=3, dilation=2, groups=2, padding_mode="circular"),
        (4, 13),
    ),
    "conv1d, same": (lambda: nn.Conv1d(3, 4, 4, padding="same", dilation=3, bias=False), (3, 11)),
    "conv2d": (lambda: nn.Conv2d(3, 4, 3), (3, 7, 6)),
    "conv2d, strided": (lambda: nn.Conv2d(3, 4, (3, 2), stride=(2, 3), padding=(1, 2)), (3, 9, 8)),
    "conv2d, dilated": (lambda: nn.Conv2d(3, 4, 3, padding=2, dilation=(2, 1)), (3, 9, 8)),
    "conv2d, groups": (lambda: nn.Conv2d(4, 8, 3, padding=1, groups=2), (4, 6, 6)),
    "conv2d, depthwise": (lambda: nn.Conv2d(4, 8, 3, padding=1, groups=4, bias=False), (4, 6, 6)),
    "conv2d, same": (lambda: nn.Conv2d(3, 4, (4, 3), padding="same"), (3, 6, 7)),
    "conv2d, valid": (lambda: nn.Conv2d(3, 4, 2, padding="valid"), (3, 6, 7)),
    "conv2d, reflected": (lambda: nn.Conv2d(3, 4, 3, padding=(2, 1), padding_mode="reflect"), (3, 6, 7)),
    "conv2d, replicated": (lambda: nn.Conv2d(3, 4, 3, padding=1, stride=2, padding_mode="replicate"), (3, 6, 7)),
    "conv2d, one pixel": (lambda: nn.Conv2d(3, 4, 1, stride=2), (3, 6, 7)),
    "conv2d, thin": (lambda: nn.Conv2d(16, 16, 3, padding=1, stride=2, dilation=2), (16, 24, 24)),
    "conv2d, few positions": (lambda: nn.Conv2d(16, 32, 3), (16, 4, 4)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2, padding=1), (2, 3, 4, 5)),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_norms_of_a_convolution_equal_one_backward_pass_per_sample(name: str) -> None:
    build, shape = CONVOLUTIONS[name]
    layer = build()
    behind = nn.Conv2d if len(shape) == 3 else nn.Conv1d if len(shape) == 2 else nn.Conv3d
    module = nn.Sequential(behind(shape[0], shape[0], 1), nn.Tanh(), layer, nn.Tanh(), nn.Flatten(), nn.LazyLinear(5))
    x = torch.randn(4, *shape)
    module(x)
    check(shaken(module), x)


@pytest.mark.parametrize("norm", ["batch", "layer", "group", "rms"])
def test_norms_of_a_normalization_layer_equal_one_backward_pass_per_sample(norm: str) -> None:
    layer = {
        "batch": nn.BatchNorm2d(6),
        "layer": nn.LayerNorm([6, 5, 5]),
        "group": nn.GroupNorm(3, 6),
        "rms": nn.RMSNorm([5, 5]),
    }[norm]
    module = nn.Sequential(nn.Conv2d(3, 6, 3), layer, nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(150, 5))
    check(shaken(module), torch.randn(4, 3, 7, 7))


def test_a_network_that_changes_the_output_of_its_first_normalization_in_place_is_supported() -> None:
    module = nn.Sequential(nn.BatchNorm1d(7), nn.ReLU(inplace=True), nn.Linear(7, 5, bias=False))
    check(shaken(module), torch.randn(4, 7))


class Reader(nn.Module):
    """A small language model: tokens to a class, with the embedding used again as the last layer if tied."""

    def __init__(self, *, batch_first: bool, tied: bool, norm_first: bool = False, causal: bool = False) -> None:
        super().__init__()
        self.batch_first, self.causal = batch_first, causal
        self.embed = nn.Embedding(9, 16, padding_idx=0)
        layer = nn.TransformerEncoderLayer(16, 4, 24, batch_first=batch_first, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 9)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x if self.batch_first else x.transpose(0, 1)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], dtype=x.dtype) if self.causal else None
        hidden = torch.zeros_like(tokens, dtype=x.dtype).masked_fill(tokens == 0, -torch.inf)
        x = self.encoder(x, mask=mask, src_key_padding_mask=hidden, is_causal=self.causal)
        return self.head(x.mean(1 if self.batch_first else 0))


@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
@pytest.mark.parametrize("batch_first", [True, False], ids=["samples first", "tokens first"])
@pytest.mark.parametrize("norm_first", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("samples", [4, 1])
def test_norms_of_an_encoder_equal_one_backward_pass_per_sample(
    batch_first: bool, tied: bool, norm_first: bool, samples: int
) -> None:
    module = Reader(batch_first=batch_first, tied=tied, norm_first=norm_first, causal=norm_first)
    tokens = torch.randint(1, 9, (samples, 4))  # as many tokens as samples: neither axis can be guessed
    tokens[0, 3] = 0
    check(shaken(module), tokens, 9)


class Crossing(nn.Module):
    """Attention from one part of the input to another, with weights of other widths."""

    def __init__(self, *, packed: bool, batch_first: bool, bias: bool, weights: bool) -> None:
        super().__init__()
        self.batch_first, self.weights = batch_first, weights
        widths = {} if packed else {"kdim": 6, "vdim": 5}
        self.start = nn.Linear(8, 8)
        self.attention = nn.MultiheadAttention(8, 2, bias=bias, batch_first=batch_first, **widths)
        self.widths = (8, 8) if packed else (6, 5)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)  # [B, T, 8]
        query, key, value = x[:, :3], x[:, 2:, : self.widths[0]], x[:, 2:, : self.widths[1]]
        if not self.batch_first:
            query, key, value = (part.transpose(0, 1) for part in (query, key, value))
        blocked = torch.zeros(3, x.shape[1] - 2, dtype=torch.bool)
        blocked[0, 1] = True
        out, looks = self.attention(query, key, value, attn_mask=blocked, need_weights=self.weights)
        pooled = out.mean(1 if self.batch_first else 0)
        return self.head(pooled) + (looks.sum((1, 2))[:, None].square() if self.weights else 0)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("weights", [True, False])
def test_norms_of_cross_attention_equal_one_backward_pass_per_sample(
    packed: bool, batch_first: bool, weights: bool
) -> None:
    module = Crossing(packed=packed, batch_first=batch_first, bias=packed, weights=weights)
    check(shaken(module), torch.randn(4, 6, 8))


@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
def test_norms_of_embeddings_exclude_pruned_weights(tied: bool) -> None:
    module = shaken(Reader(batch_first=True, tied=tied))
    prune(module, 0.5)
    check(module, torch.randint(1, 9, (4, 5)), 9)


def test_norms_of_attention_exclude_pruned_weights() -> None:
    module = shaken(Crossing(packed=True, batch_first=True, bias=True, weights=False))
    prune(module, 0.5)
    module.attention.register_buffer("in_proj_weight_mask", torch.rand(24, 8) > 0.5, persistent=False)
    check(module, torch.randn(4, 6, 8))


class Twice(nn.Module):
    """One convolution, one normalization, and one linear layer, each called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.mix = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv(x)))
        x = F.relu(self.norm(self.conv(x))).mean((2, 3))
        return self.head(self.mix(torch.tanh(self.mix(x))))


def test_a_layer_that_is_called_twice_adds_its_gradients_before_squaring() -> None:
    module = shaken(Twice())
    check(module, torch.randn(4, 4, 6, 6))
    prune(module, 0.4)
    check(module, torch.randn(4, 4, 6, 6))


class Sorting(nn.Module):
    """Computes its samples in the order of their first feature."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        order = x[:, 0].argsort()
        return self.head(torch.tanh(self.first(x[order])))[order.argsort()]


class Routing(Sorting):
    """A mixture of two experts: the sign of the first feature selects one."""

    def forward(self, x: Tensor) -> Tensor:
        hidden, chosen = torch.zeros_like(x), x[:, 0] > 0
        for rows, expert in ((chosen, self.first), (~chosen, self.head)):
            hidden = hidden.index_put((rows.nonzero()[:, 0],), F.pad(expert(x[rows]), (0, 6 - expert.out_features)))
        return hidden


@pytest.mark.parametrize("network", [Sorting, Routing])
@pytest.mark.parametrize("samples", [2, 3, 12])
def test_norms_of_a_network_that_reorders_its_samples_are_exact(network: type[Sorting], samples: int) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Per-sample gradient norms are slow")
        for seed in range(8):
            torch.manual_seed(seed)
            module = network().double()
            for size in (samples, 12, 7):
                batch = batch_of(torch.randn(size, 6).double(), 5)
                assert off(squared_norms(MemberModule(module), batch), gradient_norms(module, batch)) < 1e-10


def test_norms_of_a_batch_that_a_fast_rule_cannot_read_are_exact() -> None:
    module, x = Routing().double(), torch.randn(12, 6).double()
    together = batch_of(torch.cat([x[:, :1].abs(), x[:, 1:]], 1), 5)  # all samples take the same way
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Per-sample gradient norms are slow")  # one expert has no samples
        squared_norms(MemberModule(module), together)
    with pytest.warns(UserWarning, match="Per-sample gradient norms are slow"):
        found = squared_norms(MemberModule(module), batch_of(x, 5))
    assert off(found, gradient_norms(module, batch_of(x, 5))) < 1e-10


class Frames(nn.Module):
    """Frames of a film, which lie on the axis of the samples within."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.group = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.GroupNorm(2, 4)
        self.line, self.head = nn.Linear(4, 4), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.group(torch.tanh(self.norm(self.conv(x.flatten(0, 1)))))
        return self.head(torch.tanh(self.line(inner.mean((2, 3)))).unflatten(0, x.shape[:2]).mean(1))


def test_frames_that_are_folded_into_the_batch_belong_to_their_sample() -> None:
    check(shaken(Frames()), torch.randn(4, 3, 2, 6, 6))


class Placed(nn.Module):
    """Tokens with learned positions, which are looked up once for all samples and go through a layer of their own."""

    def __init__(self, *, lone: bool) -> None:
        super().__init__()
        self.lone = lone
        self.tokens, self.places = nn.Embedding(7, 6), nn.Embedding(5, 6)
        self.mix, self.norm, self.head = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 7)

    def forward(self, tokens: Tensor) -> Tensor:
        where = torch.arange(tokens.shape[1])
        places = torch.tanh(self.mix(self.places(where if self.lone else where[None])))
        return self.head(self.norm(self.tokens(tokens) + places).tanh().mean(1))


@pytest.mark.parametrize("lone", [True, False])
@pytest.mark.parametrize("samples", [1, 5])
def test_a_layer_with_the_same_input_for_all_samples_has_a_gradient_per_sample(lone: bool, samples: int) -> None:
    check(shaken(Placed(lone=lone)), torch.randint(0, 7, (samples, 5)), 7)


def test_frozen_parameters_and_parameters_of_other_modules_do_not_count() -> None:
    module, batch = built("resnet8").double(), batch_of(torch.randn(3, 3, 32, 32).double(), 5)
    freeze(module, ["conv1", "layer2"])
    assert off(squared_norms(MemberModule(module), batch), gradient_norms(module, batch)) < 1e-10
    head = {name: p for name, p in module.named_parameters() if name.startswith("linear")}
    found = squared_norms(MemberModule(module, own=head), batch)
    freeze(module, ["bn1", "layer1", "layer3"])
    assert off(found, gradient_norms(module, batch)) < 1e-10


def uncancelled(table: Tensor, batch: Batch) -> Tensor:
    """Cross entropy as softplus(log sum of the others - z_y): the usual form is off by 1e-5 at a margin of 25."""
    label = batch.y[:, None]
    others = table[0].scatter(1, label, -torch.inf).logsumexp(1)
    return F.softplus(others - table[0].gather(1, label)[:, 0])[None]


@pytest.mark.parametrize("by", ["bias", "weight"])
@pytest.mark.parametrize("margin", [0.0, 5.0, 15.0, 25.0])
def test_norms_of_well_fitted_samples_keep_full_precision(margin: float, by: str) -> None:
    module, x, y = built("resnet8"), torch.randn(8, 3, 32, 32), torch.full((8,), 2)
    recorded: list[Tensor] = []
    module.linear.register_forward_pre_hook(lambda _, args: recorded.append(args[0]))
    with torch.no_grad():
        module(x)
        mean = recorded[0].mean(0)
        if by == "bias":
            module.linear.bias[2] += margin
        else:
            module.linear.weight[2] += margin * mean / mean.square().sum()
    found = squared_norms(MemberModule(module), Batch(x, y, y))
    wide = Batch(x.double(), y, y)
    truth = gradient_norms(module.double(), wide, uncancelled)
    assert off(found, truth) < 1e-5
    assert off(squared_norms(MemberModule(module), wide), truth) < 1e-10


def test_logits_are_not_rounded_before_the_margin_is_computed() -> None:
    module, x, y = nn.Linear(64, 5), 1 + torch.rand(64, 64), torch.full((64,), 2)
    with torch.no_grad():
        module.weight[2] += 25 / 96
    found = squared_norms(MemberModule(module), Batch(x, y, y))
    truth = gradient_norms(module.double(), Batch(x.double(), y, y), uncancelled)
    assert float((found / truth - 1).abs().max()) < 5e-7  # rounding to float32 would cost ten times as much


def test_a_label_with_a_probability_that_rounds_to_one_in_float32_has_a_nonzero_norm() -> None:
    module = nn.Linear(3, 2)
    with torch.no_grad():
        module.weight.zero_()
        module.bias.copy_(torch.tensor([200.0, 0.0]))
    found = squared_norms(MemberModule(module), Batch(torch.ones(1, 3), torch.tensor([0]), torch.arange(1)))
    truth = 2 * torch.exp(torch.tensor(-400.0, dtype=torch.float64)) * 4  # delta = (-p, p), |x|^2 + 1 = 4
    torch.testing.assert_close(found, truth[None], rtol=1e-6, atol=0)


def test_other_losses_and_mixed_labels_are_differentiated() -> None:
    module, x = built("resnet8").double(), torch.randn(3, 3, 32, 32).double()
    smooth = cross_entropy(label_smoothing=0.1, class_weights=(1.0, 2.0, 3.0, 1.0, 1.0))
    batch = batch_of(x, 5)
    assert off(squared_norms(MemberModule(module), batch, smooth), gradient_norms(module, batch, smooth)) < 1e-10
    mixed = Batch(x, torch.rand(3, 5).double().softmax(1), torch.arange(3))
    assert off(squared_norms(MemberModule(module), mixed), gradient_norms(module, mixed)) < 1e-10


def test_one_class_has_no_gradient_and_one_sample_is_enough() -> None:
    alone = shaken(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)))
    assert squared_norms(MemberModule(alone), batch_of(torch.randn(3, 4), 1)).tolist() == [0.0, 0.0, 0.0]
    check(built("resnet8"), torch.randn(1, 3, 32, 32))


class Bent(nn.Module):
    """A layer without a rule."""

    def __init__(self, *, stubborn: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(6))
        self.stubborn = stubborn

    def forward(self, x: Tensor) -> Tensor:
        if self.stubborn and float(x.detach().sum()) == 12345.0:  # vmap cannot decide on values
            return x
        return torch.sin(x * self.scale)


class Scaled(nn.Linear):
    """A linear layer with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.weight, self.bias)


class Meddling(nn.Module):
    """Changes what a layer saw after the layer saw it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.inner.weight.requires_grad_(False)  # else autograd itself refuses

    def forward(self, x: Tensor) -> Tensor:
        recorded = x.clone()
        out = self.inner(recorded)
        return torch.sin(out) + recorded.mul_(2)


class Rows(nn.Module):
    """Uses a parameter of shape [1, ...] such that it cannot be expanded."""

    def __init__(self) -> None:
        super().__init__()
        self.row = nn.Parameter(torch.randn(1, 6))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.tanh(self.row[0])


class Outside(nn.Module):
    """Uses a layer's weight without calling the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.unused = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(F.linear(x, self.line.weight, self.line.bias))


class Both(Outside):
    """Calls the layer and also uses its weight directly."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.line(x))


class Peculiar(nn.Module):
    """Attention with learned extra keys."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, add_bias_kv=True, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None].expand(-1, 3, -1)
        return self.attention(x, x, x, need_weights=False)[0].mean(1)


class Alone(nn.Module):
    """Normalizes over positions and samples of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(torch.stack([x, x.roll(1, 1), x.roll(2, 1)], 2)).square().mean(2)


UNSUPPORTED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "custom": (Bent, r"1 \(Bent has no rule\)\. They are computed with vmap"),
    "custom, no vmap": (
        lambda: Bent(stubborn=True),
        r"1 \(Bent has no rule\)\. They are computed one sample at a time",
    ),
    "own forward": (lambda: Scaled(6, 6), "its forward is not that of Linear"),
    "changed in place": (Meddling, r"1\.inner \(its input was changed in place"),
    "rows": (Rows, r"1 \(Rows has no rule\)"),
    "outside": (Outside, r"1\.line \(it is used outside its layer's call"),
    "both": (Both, "the fast rule and a plain backward pass disagree"),
    "peculiar": (Peculiar, "bias_k"),
    "statistics of the batch": (Alone, "the fast rule and a plain backward pass disagree"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_layers_without_a_rule_are_handled_sample_by_sample_with_one_warning(name: str) -> None:
    build, message = UNSUPPORTED[name]
    module = nn.Sequential(nn.Linear(4, 6), build(), nn.Linear(6, 5)).double().eval()
    batch = batch_of(torch.randn(20, 4).double(), 5)
    with pytest.warns(UserWarning, match=message) as warned:
        norms = squared_norms(MemberModule(module), batch)
    texts = [str(warning.message) for warning in warned if "gradient norms" in str(warning.message)]
    assert len(texts) == 1
    assert "\n" not in texts[0]
    assert off(norms, gradient_norms(module, batch)) < 1e-10
    again = squared_norms(MemberModule(module), batch)  # without a second warning
    torch.testing.assert_close(again, norms, rtol=0, atol=0)


@pytest.mark.parametrize("stubborn", [False, True], ids=["vmap", "loop"])
def test_pruned_weights_of_a_layer_without_a_rule_do_not_count(stubborn: bool) -> None:
    module = nn.Sequential(nn.Linear(4, 6), Bent(stubborn=stubborn), nn.Linear(6, 5)).double().eval()
    module[1].register_buffer("scale_mask", torch.arange(6) < 3, persistent=False)
    batch = batch_of(torch.randn(20, 4).double(), 5)
    way = "one sample at a time" if stubborn else "with vmap"  # which is left if it disagrees with the loop
    with pytest.warns(UserWarning, match=rf"Bent has no rule\)\. They are computed {way}"):
        norms = squared_norms(MemberModule(module), batch)
    assert off(norms, gradient_norms(module, batch)) < 1e-10


def test_a_forward_pass_that_changes_later_is_detected() -> None:
    module = nn.Sequential(nn.Linear(4, 6), Meddling(), nn.Linear(6, 5)).double().eval()
    original, module[1].forward = module[1].forward, lambda x: torch.sin(module[1].inner(x))
    batch = batch_of(torch.randn(4, 4).double(), 5)
    assert off(squared_norms(MemberModule(module), batch), gradient_norms(module, batch)) < 1e-10
    module[1].forward = original
    with pytest.warns(UserWarning, match=r"1\.inner \(its input was changed in place"):
        norms = squared_norms(MemberModule(module), batch)
    assert off(norms, gradient_norms(module, batch)) < 1e-10


def test_the_network_is_restored() -> None:
    module = shaken(Reader(batch_first=True, tied=True))
    calls: list[int] = []
    module.head.register_forward_hook(lambda *_: calls.append(1))
    module.embed.weight.grad = torch.ones_like(module.embed.weight)
    module.encoder.layers[0].linear1.requires_grad_(False)
    before = {name: (p.requires_grad, p.clone()) for name, p in module.named_parameters()}
    parts = {name: (set(vars(part)), list(part._forward_hooks)) for name, part in module.named_modules()}
    squared_norms(MemberModule(module), batch_of(torch.randint(1, 9, (3, 4)), 9))
    assert calls
    assert torch.backends.mha.get_fastpath_enabled()
    assert parts == {name: (set(vars(part)), list(part._forward_hooks)) for name, part in module.named_modules()}
    for name, parameter in module.named_parameters():
        assert parameter.requires_grad == before[name][0]
        assert torch.equal(parameter, before[name][1])
        assert parameter.grad is None or torch.equal(parameter.grad, torch.ones_like(parameter))


def test_the_network_is_restored_after_an_error() -> None:
    module = built("vit", depth=1, width=12)
    good, bad = torch.randn(2, 3, 32, 32), torch.randn(2, 3, 28, 28)
    squared_norms(MemberModule(module), batch_of(good, 5))
    with pytest.raises(RuntimeError):
        squared_norms(MemberModule(module), batch_of(bad, 5))
    assert all(p.requires_grad for p in module.parameters())
    assert isinstance(module.cls_token, nn.Parameter)
    assert not any(part._forward_hooks for part in module.modules())


def test_hooks_that_replace_an_output_are_supported() -> None:
    module = shaken(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 5)))
    module[0].register_forward_hook(lambda layer, args, out: torch.tanh(out))
    check(module, torch.randn(4, 4))


def test_plans_keep_no_network_in_memory() -> None:
    count = len(grad_norms._plans)
    module = built("vit", depth=1, width=12)
    squared_norms(MemberModule(module), batch_of(torch.randn(2, 3, 32, 32), 5))
    assert len(grad_norms._plans) == count + 1
    del module
    assert len(grad_norms._plans) == count


def test_norms_ignore_autocast_and_no_grad() -> None:
    module, batch = built("resnet8"), batch_of(torch.randn(3, 3, 32, 32), 5)
    plain = squared_norms(MemberModule(module), batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(squared_norms(MemberModule(module), batch), plain)
    with torch.no_grad():
        assert torch.equal(squared_norms(MemberModule(module), batch), plain)


def test_half_precision_and_networks_without_trained_parameters_are_rejected() -> None:
    batch = batch_of(torch.randn(3, 4), 5)
    with pytest.raises(ValueError, match=r"bfloat16.*call \.float"):
        squared_norms(MemberModule(nn.Linear(4, 5).bfloat16()), batch)
    with pytest.raises(ValueError, match="No parameter is trained"):
        squared_norms(MemberModule(nn.Linear(4, 5).requires_grad_(False)), batch)


def test_the_scoring_batch_is_a_power_of_two_that_grows_with_the_bound() -> None:
    module, batch = built("resnet8"), batch_of(torch.randn(2, 3, 32, 32), 5)
    sizes = [
        max_batch_size(MemberModule(module), batch, bound=bound) for bound in (1, 2**25 + 2**22, 2**26, 2**28, 2**40)
    ]
    assert sizes[0] == 1
    assert sizes[-1] == 512
    assert sizes == sorted(sizes)
    assert 1 < sizes[2] < sizes[3] < 512
    assert all(size & (size - 1) == 0 for size in sizes)
    one = batch_of(batch.x[:1], 5)
    assert [
        max_batch_size(MemberModule(module), one, bound=bound) for bound in (1, 2**25 + 2**22, 2**26, 2**28, 2**40)
    ] == sizes
