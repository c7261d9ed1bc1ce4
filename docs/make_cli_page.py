"""Write docs/reference/cli.md, the command-line reference, from the Typer application.

python docs/make_cli_page.py            # write the page
python docs/make_cli_page.py --check    # exit code 1 if the page is out of date

Commands, arguments, options, defaults and help texts come from `plateaux.cli`.
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import typer
from _generated import write_or_check

from plateaux.cli import groups
from plateaux.cli.common import CODES
from plateaux.cli.main import app

PAGE = Path(__file__).parent / "reference" / "cli.md"
# The order of the page, as in `--help`. A command that is missing there is an error.
GROUPS = {
    title: [each for name in names for each in (("recipe check", "recipe schema") if name == "recipe" else (name,))]
    for title, names in groups.GROUPS.items()
}
HEAD = """\
# Command line

<!-- Written by docs/make_cli_page.py from the Typer application. Change the code and run the script again. -->

`--help` after any command prints the same text. Commands print tables, also to a pipe, and JSON with `--json`.
"""
SHARED = 3  # an option that means the same in at least three commands is described once
EXIT_CODES = {
    0: "success",
    1: "a process or another part failed; the message gives the reason",
    2: "invalid recipe or arguments",
    3: "data are missing or damaged, or no input could be predicted",
    4: "the run folder or the storage cannot be used",
    5: "a loss became NaN or infinite",
    6: "the recipe names code that is neither marked as a plug-in nor trusted",
    75: "interrupted after a checkpoint: run the same command again",
}
TYPES = {str: "text", int: "integer", float: "number", Path: "path"}


def page() -> str:
    """Return the page as Markdown."""
    found = dict(_commands("", typer.main.get_command(app)))
    # An installed package, such as plateaux-papers, may add commands; its own pages describe them.
    commands = {name: each for name, each in found.items() if each.callback.__module__.startswith("plateaux.")}
    listed = [name for names in GROUPS.values() for name in names]
    assert sorted(listed) == sorted(commands), f"docs/make_cli_page.py: GROUPS differs: {set(listed) ^ set(commands)}"
    shared = _shared(commands)
    parts = [HEAD, "## Options of several commands", "", *_table([_row(param) for param in shared.values()])]
    for title, names in GROUPS.items():
        parts += [f"## {title}", "", *(line for name in names for line in _command(name, commands[name], shared))]
    return "\n".join([*parts, *_exit_codes()])


def _shared(commands: dict[str, Any]) -> dict[str, Any]:
    """Return the options that several commands have with the same meaning, by their row of the table."""
    found: dict[str, list[Any]] = {}
    for name in (name for names in GROUPS.values() for name in names):
        for param in _options(commands[name]):
            found.setdefault(_row(param), []).append(param)
    return {row: params[0] for row, params in found.items() if len(params) >= SHARED}


def _exit_codes() -> list[str]:
    """Return the section about exit codes."""
    rows = [f"| {code} | {EXIT_CODES[code]} |" for code in sorted({0, *(code for _, code in CODES)})]
    return ["## Exit codes", "", "| exit code | meaning |", "|---|---|", *rows, ""]


def _commands(prefix: str, command: Any) -> list[tuple[str, Any]]:
    if not hasattr(command, "commands"):
        return [(prefix, command)]
    pairs = [_commands(f"{prefix} {name}".strip(), child) for name, child in command.commands.items()]
    return [pair for group in pairs for pair in group]


def _options(command: Any) -> list[Any]:
    return [param for param in command.params if param.param_type_name == "option" and not param.hidden]


def _row(param: Any) -> str:
    names = _names(param) if param.param_type_name == "option" else f"`{_metavar(param)}`"
    kind = _type(param)
    if param.param_type_name == "option" and (default := _default(param)):
        kind += f", {default}"
    return f"| {names} | {kind} | {_cell(param.help or '')} |"


def _table(rows: list[str]) -> list[str]:
    return ["| option | type, default | meaning |", "|---|---|---|", *rows, ""] if rows else []


def _command(name: str, command: Any, shared: dict[str, Any]) -> list[str]:
    arguments = [param for param in command.params if param.param_type_name == "argument" and not param.hidden]
    options = _options(command)
    usage = " ".join(["plateaux", name, *(_metavar(param) for param in arguments), *(["[OPTIONS]"] if options else [])])
    summary, *rest = _help(command)
    lines = [f"### plateaux {name}", "", summary, "", "```text", usage, "```", ""]
    own = [param for param in (*arguments, *options) if param.help and _row(param) not in shared]
    lines += _table([_row(param) for param in own])
    known = [_names(param) for param in options if _row(param) in shared]
    lines += [f"Also {', '.join(known)}.", ""] if known else []
    for paragraph in rest:
        lines += [paragraph, ""]
    return lines


def _help(command: Any) -> list[str]:
    """Return the paragraphs of a command's help, each on one line."""
    text = inspect.cleandoc(command.help or "")
    return [" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text)] or [""]


def _metavar(param: Any) -> str:
    if param.metavar:
        return str(param.metavar)
    name = param.name.upper()
    name += "..." if param.nargs == -1 else ""
    return name if param.required else f"[{name}]"


def _names(param: Any) -> str:
    """Return the spellings of an option; a flag that is off by default is shown without its negative."""
    names = list(param.opts) + (list(param.secondary_opts) if param.default is True else [])
    return ", ".join(f"`{name}`" for name in names)


def _type(param: Any) -> str:
    return _type_name(param.type_descriptor.annotation)


def _type_name(annotation: Any) -> str:
    origin, inner = get_origin(annotation), [each for each in get_args(annotation) if each is not NoneType]
    if annotation is bool:
        return "flag"
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in inner)
    if origin in (Union, UnionType):
        return " or ".join(_type_name(each) for each in inner)
    if origin is list:
        return f"{_type_name(inner[0])}, repeatable"
    return TYPES.get(annotation, "text")


def _default(param: Any) -> str:
    if param.required:
        return "required"
    if param.type_descriptor.annotation is bool:
        return "on" if param.default else ""
    if param.default in (None, (), []):
        return ""
    return f"`{param.default}`"


def _cell(text: str) -> str:
    """Return text for a table cell, with the characters escaped that Markdown would interpret outside code."""
    parts = " ".join(text.split()).split("`")
    parts[::2] = [re.sub(r"([*|])", r"\\\1", part).replace("<", "&lt;") for part in parts[::2]]
    return "`".join(parts)


if __name__ == "__main__":
    sys.exit(write_or_check({PAGE: page()}))
