"""Every model of timm as `timm:<name>`."""

from __future__ import annotations

from difflib import get_close_matches

from torch import nn

from plateaux.core.errors import RecipeError, UnknownNameError
from plateaux.core.imports import optional_import
from plateaux.core.ranges import Fraction, Size
from plateaux.core.registry import NO_HUB_ACCESS, HubAccess, model
from plateaux.models.architectures import channels


@model(prefix="timm:")
def timm_model(
    name: str,
    *,
    shape: tuple[int, ...],
    classes: int,
    pretrained: bool = False,
    img_size: Size | None = None,
    drop_rate: Fraction = 0.0,
    drop_path_rate: Fraction = 0.0,
    hub_access: HubAccess = NO_HUB_ACCESS,
) -> nn.Module:
    """Any timm model by its name.

    Models with a fixed input size are built for the images of the data set, or for `img_size`. `pretrained` downloads
    weights, which `--download` must allow; offline, load a weights file instead.
    """
    pretrained = pretrained and not hub_access.has_weights
    if pretrained and not hub_access.download:
        raise RecipeError(
            f"model.pretrained = true downloads the weights of timm's {name}: allow the download with --download (in "
            "Python: download=True), or omit it and set model.weights to the path of a weights file"
        )
    timm = optional_import("timm", extra="vision")
    inputs = channels(shape)
    if not timm.is_model(name):
        raise UnknownNameError(f"timm has no model {name!r}; {_suggest_model(name, timm.list_models())}")
    options: dict[str, object] = {"num_classes": classes, "in_chans": inputs}
    entry = timm.get_pretrained_cfg(name)
    if img_size is not None:
        options["img_size"] = img_size
    elif entry is not None and entry.fixed_input_size:
        options["img_size"] = shape[1] if shape[1] == shape[2] else shape[1:]
    # Not every model accepts both rates, so a rate of zero is not passed.
    options |= {k: v for k, v in {"drop_rate": drop_rate, "drop_path_rate": drop_path_rate}.items() if v}
    try:
        return timm.create_model(name, pretrained=pretrained, **options)  # type: ignore[no-any-return]
    except TypeError as error:
        if "unexpected keyword argument" in str(error):
            raise RecipeError(f"timm's {name} does not accept an option: {error}. Omit that option.") from error
        raise
    except Exception as error:
        if not pretrained:
            raise
        raise RecipeError(
            f"pretrained = true downloads the weights of timm's {name}, which failed with {type(error).__name__}: "
            f"{error}. Omit it, and load a weights file if you have one."
        ) from error


def _suggest_model(name: str, names: list[str]) -> str:
    matches = get_close_matches(name, names, n=3)
    return f"did you mean {' or '.join(map(repr, matches))}?" if matches else "see timm.list_models()"
