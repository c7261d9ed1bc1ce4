"""Recipes, studies, and claims that are not valid TOML are reported, never as a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from plateaux.cli.main import app
from plateaux.config.recipe import Recipe
from plateaux.core.errors import RecipeError
from plateaux.studies.study import Study

LATIN1 = 'name = "Grün"\n'.encode("latin-1")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (LATIN1, "is not UTF-8 text (byte 0xfc at offset 10); save it as UTF-8"),
        (b"\xff\xfe[\x00d\x00", "is not UTF-8 text (byte 0xff at offset 0)"),
        (b"a = " + b"[" * 100_000, "is nested too deeply"),
        (b"a = " + b"9" * 5_000, "Exceeds the limit"),
        (b"a = 2001-02-31", "Invalid date"),
        (b"a = 1\na = 2\n", "Cannot overwrite a value (at line 2"),
        (b"a = '\x00'", "invalid character"),
    ],
)
@pytest.mark.parametrize("kind", ["recipe", "study"])
def test_a_file_that_is_not_toml_is_reported_with_its_name(
    tmp_path: Path, kind: str, content: bytes, message: str
) -> None:
    file = tmp_path / "file.toml"
    file.write_bytes(content)
    read = {"recipe": Recipe.load, "study": Study.load}[kind]
    with pytest.raises(RecipeError) as problem:
        read(file)
    assert "file.toml" in str(problem.value)
    assert message in str(problem.value)


@pytest.mark.parametrize("command", [["train"], ["recipe", "check"], ["study"]])
def test_a_file_that_is_not_utf_8_gives_exit_code_2(tmp_path: Path, command: list[str]) -> None:
    file = tmp_path / "file.toml"
    file.write_bytes(LATIN1)
    result = CliRunner().invoke(app, [*command, str(file)])
    assert (result.exit_code, type(result.exception)) == (2, SystemExit)
    assert "save it as UTF-8" in result.stderr


def test_a_byte_order_mark_is_ignored(tmp_path: Path) -> None:
    file = tmp_path / "file.toml"
    file.write_text('[data]\nname = "digits"\n[model]\nname = "mlp"\n', encoding="utf-8-sig")
    assert Recipe.load(file).data.name == "digits"
