"""The command that makes a run of weights trained elsewhere."""

import json
from pathlib import Path
from typing import Annotated

import typer

import plateaux
from plateaux.cli.common import AsJson, Changes, Download, Trust, print_result
from plateaux.core.errors import RecipeError


def import_weights(
    out: Annotated[Path, typer.Option("--out", "-o", help="The run folder to create.")],
    model: Annotated[list[str], typer.Option(help="The name of the model; once, or once for each file.")],
    weights: Annotated[
        list[str],
        typer.Option(
            help="FILE or FILE:prefix, once for each member, or a quoted pattern: 'seeds/*/last.ckpt'. A .safetensors, "
            ".pt, .pth, or Lightning .ckpt file, or a folder of Hugging Face."
        ),
    ],
    data: Annotated[str, typer.Option(help="The dataset that the models were trained for.")],
    rename: Annotated[
        list[str] | None,
        typer.Option(help="OLD=NEW: entries of the files that start with OLD start with NEW in the model."),
    ] = None,
    ignore: Annotated[
        list[str] | None, typer.Option(help="Leave out the entries of the files that start with this text.")
    ] = None,
    changes: Changes = None,
    trust: Trust = None,
    download: Download = False,
    as_json: AsJson = False,
) -> None:
    """Create a run from weights trained elsewhere: Lightning checkpoints, Hugging Face folders, or state dicts.

    In Python: `plateaux.import_weights("runs/mine", recipe, ["a.ckpt", "b.ckpt"])`
    """
    from plateaux.storage.import_weights import expand_patterns

    files = expand_patterns(weights)
    models = json.dumps(model) if len(model) > 1 else json.dumps(model[0])
    text = f"members = {len(files)}\n[data]\nname = {json.dumps(data)}\n[model]\nname = {models}\n"
    recipe = plateaux.Recipe.parse(text, changes or [], where="import-weights")
    names = _names(rename or [], ignore or [])
    plateaux.import_weights(out, recipe, files, names=names, trust=trust or (), download=download)
    print_result(as_json, {"run": str(out), "members": len(files)}, lambda: [f"{out}: {len(files)} members imported"])


def _names(rename: list[str], ignore: list[str]) -> dict[str, str | None]:
    """Return the names of --rename and --ignore; OLD= removes a prefix."""
    names: dict[str, str | None] = dict.fromkeys(ignore)
    for text in rename:
        old, sign, new = text.partition("=")
        if not sign:
            raise RecipeError(f"--rename {text!r}: write OLD=NEW, such as --rename classifier.=head.")
        names[old] = new
    return names
