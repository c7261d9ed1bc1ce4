"""A frozen backbone shared by all members, and the head of each member.

    backbone = Backbone(network, "features", shape=(3, 32, 32))  # all but the last layer, stored once
    member = BackboneWithHead(backbone, build_head("mlp", backbone.shape, classes=10, width=512))
    member(images), member(backbone(images))                     # equal: features are recognized by their shape

A network is split after any of its submodules, or before its last layer. The rest is replaced by a new head, or is
kept as the member's own last blocks (`own_head`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from hashlib import blake2b
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn

from plateaux.core.errors import RecipeError, suggest
from plateaux.models.modes import eval_mode
from plateaux.models.resizing import Interpolation, resize, resized_shape

FEATURES = "features"  # the input of the last layer


class Backbone(nn.Module):
    """A network up to one of its submodules; later submodules are removed to free their memory."""

    def __init__(
        self,
        model: nn.Module,
        layer: str,
        *,
        shape: Sequence[int],
        image_size: int | None = None,
        interpolation: Interpolation = "bilinear",
        pool: bool = True,
    ) -> None:
        super().__init__()
        self.model = model.eval()
        self.image_size, self.interpolation, self.pool = image_size, interpolation, pool
        self._hash: tuple[tuple[int, ...] | None, str] = None, ""
        self.layer, self.before = split_module(model, layer, resized_shape(shape, image_size))
        _remove_later_modules(model, self.layer, self.before, resized_shape(shape, image_size))
        with _probing(self.model):
            zeros = _zero_input(self.model, resized_shape(shape, image_size))
            features = _run_until(self.model, self.layer, self.before, (zeros,), {})
        self.shape = tuple((_pool(features) if pool else features).shape[1:])
        if self.shape == tuple(shape):
            raise RecipeError(
                f"model.backbone = {layer!r}: its features have the same shape as an input, {list(shape)}, so the two "
                "cannot be distinguished. Split at a later submodule."
            )

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        if self.image_size is not None and isinstance(args[0], Tensor):
            args = (resize(args[0], self.image_size, self.interpolation), *args[1:])
        features = _run_until(self.model, self.layer, self.before, args, kwargs)
        return _pool(features) if self.pool else features

    def hash(self) -> str:
        """Return a hash of the weights and of the split."""
        tensors = self.state_dict()
        versions = tuple(tensor._version for tensor in tensors.values())  # change when other weights are loaded
        if self._hash[0] != versions:
            self._hash = versions, self._compute_hash(tensors)
        return self._hash[1]

    def _compute_hash(self, tensors: Mapping[str, Tensor]) -> str:
        mode = "" if self.interpolation == "bilinear" else f" {self.interpolation}"
        digest = blake2b(f"{self.layer} {self.before} {self.image_size} {self.pool}{mode}".encode(), digest_size=8)
        for name, tensor in sorted(tensors.items()):
            cpu_tensor = tensor.detach().cpu().float() if tensor.is_floating_point() else tensor.cpu()
            digest.update(f"{name}{tuple(cpu_tensor.shape)}".encode())
            digest.update(cpu_tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()


class BackboneWithHead(nn.Module):
    """A shared backbone and the member's own head; takes inputs, or features of the backbone."""

    def __init__(self, backbone: Backbone, head: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and isinstance(args[0], Tensor) and tuple(args[0].shape[1:]) == self.backbone.shape:
            return self.head(args[0])
        return self.head(self.backbone(*args, **kwargs))


def common_backbone(modules: Sequence[nn.Module]) -> Backbone | None:
    """Return the backbone that all of these members share, or None."""
    first = modules[0] if modules else None
    is_shared = isinstance(first, BackboneWithHead) and all(
        isinstance(m, BackboneWithHead) and m.backbone is first.backbone for m in modules
    )
    return first.backbone if is_shared and isinstance(first, BackboneWithHead) else None


def build_head(kind: Literal["linear", "mlp"], shape: Sequence[int], *, classes: int, width: int) -> nn.Module:
    """Build a new head for features of that shape: one layer, or two with `width` hidden units."""
    inputs = prod(shape)
    if kind == "linear":
        return nn.Sequential(nn.Flatten(), nn.Linear(inputs, classes))
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, classes))


def own_head(model: nn.Module, layer: str, shape: Sequence[int], *, image_size: int | None = None) -> nn.Module:
    """Return the rest of a network after the split, as a module that takes the features of the backbone."""
    name, before = split_module(model, layer, resized_shape(shape, image_size))
    graphs = [_trace(model.train(mode), name) for mode in (False, True)]
    if str(graphs[0]) != str(graphs[1]):  # such as F.dropout(training=self.training): a trace contains only one mode
        raise _untraceable_error(layer, "behaves differently in training and evaluation outside of its submodules")
    graph = graphs[1]
    calls = [node for node in graph.nodes if node.op == "call_module" and node.target == name]
    if not calls:
        raise _untraceable_error(layer, "does not call that submodule from its forward pass")
    head_graph = fx.Graph()
    features = head_graph.placeholder("features")
    copies: dict[fx.Node, Any] = {calls[-1].all_input_nodes[0] if before else calls[-1]: features}
    (output,) = [node for node in graph.nodes if node.op == "output"]
    _copy_dependencies(output, head_graph, copies, layer)
    return fx.GraphModule(model, head_graph, class_name="Rest")


def check_backbone(model: Mapping[str, Any], *, mixes: bool) -> None:
    """Raise an error for inconsistent keys of [model]; `mixes` is whether mixup or cutmix is on."""
    if model["backbone"] is None:
        for name, default in (("head", "own"), ("cache_features", False)):
            if model[name] != default:
                raise RecipeError(
                    f"model.{name} = {model[name]!r} needs a backbone. Set model.backbone, for example to 'features'."
                )
        return
    if not isinstance(model["name"], str):
        raise RecipeError(f"model.name = {list(model['name'])}: members share one backbone. Use one model name.")
    if model["freeze"]:
        raise RecipeError("model.freeze and model.backbone both define what is frozen. Omit one of them.")
    if model["cache_features"] and mixes:
        raise RecipeError(
            "data.mixup and data.cutmix mix images, but model.cache_features caches the features of single images. "
            "Omit one of the two."
        )


def split_module(model: nn.Module, layer: str, shape: Sequence[int]) -> tuple[str, bool]:
    """Return the submodule at which a network is split, and whether the split is before instead of after it."""
    if layer != FEATURES:
        names = [name for name, _ in model.named_modules() if name]
        if layer not in names:
            children = [name for name, _ in model.named_children()]
            hint = suggest(layer, [*names, FEATURES])
            raise RecipeError(
                f"model.backbone = {layer!r}: the model has no such submodule; "
                f"{hint if hint[:3] == 'did' else suggest(layer, [*children, FEATURES])}"
            )
        return layer, False
    outputs: dict[str, Any] = {}
    with _probing(model) as stack:
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                hook = module.register_forward_hook(lambda _, __, out, name=name: outputs.update({name: out}))
                stack.callback(hook.remove)
        out = model(_zero_input(model, shape))
    logits = out if isinstance(out, Tensor) else out.logits
    last_layers = [name for name, output in outputs.items() if output is logits]
    if not last_layers:
        raise RecipeError(
            f"model.backbone = 'features' is the input of the last nn.Linear, but this {type(model).__name__} does not "
            f"end in one. Name the submodule to split after: {', '.join(n for n, _ in model.named_children())}"
        )
    return last_layers[0], True


class _StopForward(Exception):
    """Carries the features out of the middle of a forward pass."""

    def __init__(self, features: Any) -> None:
        super().__init__("features")
        self.features = features


def _run_until(model: nn.Module, layer: str, before: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    def stop(_: nn.Module, inputs: tuple[Any, ...], *output: Any) -> None:
        raise _StopForward(inputs[0] if before else output[0])

    module = model.get_submodule(layer)
    handle = module.register_forward_pre_hook(stop) if before else module.register_forward_hook(stop)
    try:
        model(*args, **kwargs)
    except _StopForward as stopped:
        return stopped.features if isinstance(stopped.features, Tensor) else stopped.features[0]
    finally:
        handle.remove()
    raise RecipeError(f"The forward pass never reaches the submodule {layer!r}. Split at another one.")


def _pool(x: Tensor) -> Tensor:
    """Average over the positions of an image or a sequence: one vector per sample."""
    return x.mean((2, 3)) if x.dim() == 4 else x.mean(1) if x.dim() == 3 else x


@contextmanager
def _probing(model: nn.Module) -> Iterator[ExitStack]:
    """Switch to evaluation mode without gradients, and yield an exit stack for hooks to remove afterwards."""
    with eval_mode([model]), torch.no_grad(), ExitStack() as stack:
        yield stack


def _zero_input(model: nn.Module, shape: Sequence[int]) -> Tensor:
    is_text = getattr(model, "main_input_name", "") == "input_ids"  # as networks of transformers say
    return torch.zeros(1, *shape, dtype=torch.int64 if is_text else torch.float32)


def _remove_later_modules(model: nn.Module, layer: str, before: bool, shape: Sequence[int]) -> None:
    """Replace the submodules that run only after the split by nn.Identity."""
    started: set[str] = set()
    finished: set[str] = set()
    with _probing(model) as stack:
        for name, module in model.named_modules():
            stack.callback(module.register_forward_pre_hook(lambda *_, name=name: started.add(name)).remove)
            stack.callback(module.register_forward_hook(lambda *_, name=name: finished.add(name)).remove)
        _run_until(model, layer, before, (_zero_input(model, shape),), {})
    for parent in started - finished - {layer}:  # a finished module may use its children without calling them
        for child, _ in list(model.get_submodule(parent).named_children()):
            name = f"{parent}.{child}" if parent else child
            if name not in started or (before and name == layer):
                setattr(model.get_submodule(parent), child, nn.Identity())


def _trace(model: nn.Module, layer: str) -> fx.Graph:
    class Tracer(fx.Tracer):
        """Traces only into the modules that contain the split."""

        def is_leaf_module(self, m: nn.Module, name: str) -> bool:
            return not layer.startswith(f"{name}.")

    try:
        return Tracer().trace(model)
    except Exception as error:  # a forward pass may fail in any way on a symbolic tensor
        raise _untraceable_error(layer, f"cannot be traced ({type(error).__name__}: {error})") from error


def _copy_dependencies(node: fx.Node, graph: fx.Graph, copies: dict[fx.Node, Any], layer: str) -> None:
    """Copy a node and its dependencies into the graph, back to the split."""
    if node in copies:
        return
    if node.op == "placeholder":
        raise _untraceable_error(layer, "uses tensors from before the split after it")
    for dependency in node.all_input_nodes:
        _copy_dependencies(dependency, graph, copies, layer)
    copies[node] = graph.node_copy(node, lambda other: copies[other])


def _untraceable_error(layer: str, reason: str) -> RecipeError:
    return RecipeError(
        f"model.backbone = {layer!r}: the rest of the network cannot become a separate module, because the model "
        f"{reason}. Split elsewhere, or use a new head: model.head = 'linear' or 'mlp'."
    )
