"""A frozen trunk that all members share, and the head that each puts on top of it.

    trunk = Trunk(network, "features", shape=(3, 32, 32))       # all but the last layer, held once
    member = Headed(trunk, head("mlp", trunk.shape, classes=10, width=512))
    member(images), member(trunk(images))                       # the same: features are known by their shape

A network is cut after any of its parts, or before its last layer. What follows the cut is replaced by a new head, or
stays as the member's own last blocks (`rest`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from hashlib import blake2b
from math import prod
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from plateaux.core.errors import RecipeError, suggest
from plateaux.models.modes import eval_mode

FEATURES = "features"  # stands for what the last layer sees
Head = Literal["own", "linear", "mlp"]


class Backbone(nn.Module):
    """A network up to one of its parts; what comes later is taken out, so that it holds no memory."""

    def __init__(
        self, model: nn.Module, layer: str, *, shape: Sequence[int], image_size: int | None = None, pool: bool = True
    ) -> None:
        super().__init__()
        self.model = model.eval()
        self.image_size, self.pool = image_size, pool
        self._hash: tuple[tuple[int, ...] | None, str] = None, ""
        self.layer, self.before = split_module(model, layer, _at_size(shape, image_size))
        _take_out(model, self.layer, self.before, _at_size(shape, image_size))
        with _quietly(self.model):
            found = _up_to(self.model, self.layer, self.before, (_blank(_at_size(shape, image_size)),), {})
        self.shape = tuple((_pooled(found) if pool else found).shape[1:])
        if self.shape == tuple(shape):
            raise RecipeError(
                f"model.backbone = {layer!r}: its features have the shape of an input, {list(shape)}, and the two "
                "could "
                "not be told apart; cut later"
            )

    def forward(self, *args: Any, **named: Any) -> Tensor:
        if self.image_size is not None and isinstance(args[0], Tensor):
            args = (resize(args[0], self.image_size), *args[1:])
        found = _up_to(self.model, self.layer, self.before, args, named)
        return _pooled(found) if self.pool else found

    def hash(self) -> str:
        """Return a hash of the weights and of the cut."""
        tensors = self.state_dict()
        stamp = tuple(tensor._version for tensor in tensors.values())  # other weights loaded: another stamp
        if self._hash[0] != stamp:
            self._hash = stamp, self._hashed(tensors)
        return self._hash[1]

    def _hashed(self, tensors: Mapping[str, Tensor]) -> str:
        digest = blake2b(f"{self.layer} {self.before} {self.image_size} {self.pool}".encode(), digest_size=8)
        for name, tensor in sorted(tensors.items()):
            plain = tensor.detach().cpu().float() if tensor.is_floating_point() else tensor.cpu()
            digest.update(f"{name}{tuple(plain.shape)}".encode())
            digest.update(plain.contiguous().numpy().tobytes())
        return digest.hexdigest()


class BackboneWithHead(nn.Module):
    """A trunk and a head of one's own; takes inputs, or the trunk's features of them."""

    def __init__(self, backbone: Backbone, top: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = top

    def forward(self, *args: Any, **named: Any) -> Any:
        if len(args) == 1 and isinstance(args[0], Tensor) and tuple(args[0].shape[1:]) == self.backbone.shape:
            return self.head(args[0])
        return self.head(self.backbone(*args, **named))


def common_backbone(modules: Sequence[nn.Module]) -> Backbone | None:
    """Return the trunk that all of these members stand on, if they do."""
    first = modules[0] if modules else None
    same = isinstance(first, BackboneWithHead) and all(
        isinstance(m, BackboneWithHead) and m.backbone is first.backbone for m in modules
    )
    return first.backbone if same and isinstance(first, BackboneWithHead) else None


def build_head(kind: Literal["linear", "mlp"], shape: Sequence[int], *, classes: int, width: int) -> nn.Module:
    """Return a new head over features of that shape: one layer, or two with `width` units between them."""
    inputs = prod(shape)
    if kind == "linear":
        return nn.Sequential(nn.Flatten(), nn.Linear(inputs, classes))
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, classes))


def own_head(model: nn.Module, layer: str, shape: Sequence[int], *, image_size: int | None = None) -> nn.Module:
    """Return what follows a cut, as a network of its own that takes the trunk's features."""
    name, before = split_module(model, layer, _at_size(shape, image_size))
    graphs = [_traced(model.train(mode), name) for mode in (False, True)]
    if str(graphs[0]) != str(graphs[1]):  # such as F.dropout(training=self.training): tracing would fix one of the two
        raise _cannot_follow(layer, "does other things in training than in evaluation outside of its parts")
    graph = graphs[1]
    calls = [node for node in graph.nodes if node.op == "call_module" and node.target == name]
    if not calls:
        raise _cannot_follow(layer, "does not call that part from its own forward pass")
    after = fx.Graph()
    inlet = after.placeholder("features")
    known: dict[fx.Node, Any] = {calls[-1].all_input_nodes[0] if before else calls[-1]: inlet}
    (end,) = [node for node in graph.nodes if node.op == "output"]
    _copy_back(end, after, known, layer)
    return fx.GraphModule(model, after, class_name="Rest")


def resize(x: Tensor, size: int) -> Tensor:
    """Return images at `size` x `size` pixels."""
    if x.shape[-1] == x.shape[-2] == size:
        return x
    return F.interpolate(x, (size, size), mode="bilinear", antialias=True, align_corners=False)


def check_backbone(model: Mapping[str, Any], *, mixes: bool) -> None:
    """Refuse keys of [model] that do not go together; `mixes` says whether samples are mixed in training."""
    if model["backbone"] is None:
        for name, usual in (("head", "own"), ("image_size", None), ("cache_features", False)):
            if model[name] != usual:
                raise RecipeError(
                    f"model.{name} = {model[name]!r} speaks of a trunk: set model.backbone, such as 'features'"
                )
        return
    if not isinstance(model["name"], str):
        raise RecipeError(f"model.name = {list(model['name'])}: members share one trunk, so give one name")
    if model["freeze"]:
        raise RecipeError("model.freeze and model.backbone both say what is frozen; leave one of them out")
    if model["cache_features"] and mixes:
        raise RecipeError(
            "data.mixup and data.cutmix mix images, and model.cache_features keeps features of single ones: leave out "
            "one of the two"
        )


def split_module(model: nn.Module, layer: str, shape: Sequence[int]) -> tuple[str, bool]:
    """Return the part a network is cut at, and whether before it rather than after."""
    if layer != FEATURES:
        parts = [name for name, _ in model.named_modules() if name]
        if layer not in parts:
            children = [name for name, _ in model.named_children()]
            near = suggest(layer, [*parts, FEATURES])
            raise RecipeError(
                f"model.backbone = {layer!r}: the model has no such part; "
                f"{near if near[:3] == 'did' else suggest(layer, [*children, FEATURES])}"
            )
        return layer, False
    outputs: dict[str, Any] = {}
    with _quietly(model) as undo:
        for name, part in model.named_modules():
            if isinstance(part, nn.Linear):
                hook = part.register_forward_hook(lambda _, __, out, name=name: outputs.update({name: out}))
                undo.callback(hook.remove)
        out = model(_blank(shape))
    whole = out if isinstance(out, Tensor) else out.logits
    found = [name for name, each in outputs.items() if each is whole]
    if not found:
        raise RecipeError(
            f"model.backbone = 'features' is what the last nn.Linear sees, and this {type(model).__name__} does "
            "not end "
            f"in one; name the part to cut after: {', '.join(n for n, _ in model.named_children())}"
        )
    return found[0], True


class _Enough(Exception):
    """Carries what was looked for out of the middle of a forward pass."""

    def __init__(self, found: Any) -> None:
        super().__init__("features")
        self.found = found


def _up_to(model: nn.Module, layer: str, before: bool, args: tuple[Any, ...], named: dict[str, Any]) -> Tensor:
    def stop(_: nn.Module, inputs: tuple[Any, ...], *output: Any) -> None:
        raise _Enough(inputs[0] if before else output[0])

    part = model.get_submodule(layer)
    handle = part.register_forward_pre_hook(stop) if before else part.register_forward_hook(stop)
    try:
        model(*args, **named)
    except _Enough as enough:
        return enough.found if isinstance(enough.found, Tensor) else enough.found[0]
    finally:
        handle.remove()
    raise RecipeError(f"The model never comes to its part {layer!r}; cut it at another")


def _pooled(x: Tensor) -> Tensor:
    """Return one row of numbers a sample: the mean over the places of an image or a sentence."""
    return x.mean((2, 3)) if x.dim() == 4 else x.mean(1) if x.dim() == 3 else x


@contextmanager
def _quietly(model: nn.Module) -> Iterator[ExitStack]:
    """Put a network into evaluation for a look at it, and lend a stack of what is to be undone afterwards."""
    with eval_mode([model]), torch.no_grad(), ExitStack() as undo:
        yield undo


def _blank(shape: Sequence[int]) -> Tensor:
    return torch.zeros(1, *shape)


def _at_size(shape: Sequence[int], resize: int | None) -> tuple[int, ...]:
    return tuple(shape) if resize is None else (shape[0], resize, resize)


def _take_out(model: nn.Module, layer: str, before: bool, shape: Sequence[int]) -> None:
    """Replace the parts that a network comes to only after the cut by nothing."""
    begun: set[str] = set()
    ended: set[str] = set()
    with _quietly(model) as undo:
        for name, part in model.named_modules():
            undo.callback(part.register_forward_pre_hook(lambda *_, name=name: begun.add(name)).remove)
            undo.callback(part.register_forward_hook(lambda *_, name=name: ended.add(name)).remove)
        _up_to(model, layer, before, (_blank(shape),), {})
    for parent in begun - ended - {layer}:  # one that has ended may use parts of its own without calling them
        for child, _ in list(model.get_submodule(parent).named_children()):
            name = f"{parent}.{child}" if parent else child
            if name not in begun or (before and name == layer):
                setattr(model.get_submodule(parent), child, nn.Identity())


def _traced(model: nn.Module, layer: str) -> fx.Graph:
    class Tracer(fx.Tracer):
        """Looks only into the parts that hold the cut."""

        def is_leaf_module(self, m: nn.Module, name: str) -> bool:
            return not layer.startswith(f"{name}.")

    try:
        return Tracer().trace(model)
    except Exception as problem:  # whatever a forward pass does with something that is no tensor yet
        raise _cannot_follow(layer, f"cannot be traced ({type(problem).__name__}: {problem})") from problem


def _copy_back(node: fx.Node, into: fx.Graph, known: dict[fx.Node, Any], layer: str) -> None:
    """Copy a node and all that it needs, back to the cut."""
    if node in known:
        return
    if node.op == "placeholder":
        raise _cannot_follow(layer, "looks back, after the cut, at what came before it")
    for needed in node.all_input_nodes:
        _copy_back(needed, into, known, layer)
    known[node] = into.node_copy(node, lambda other: known[other])


def _cannot_follow(layer: str, why: str) -> RecipeError:
    return RecipeError(
        f"model.backbone = {layer!r}: what follows cannot be made a network of its own, for the model {why}. Cut it "
        "elsewhere, or put a new head on top: model.head = 'linear' or 'mlp'"
    )
