"""A missing library, or a torchvision that does not fit torch, is an error that says what to install."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from plateaux.core import imports
from plateaux.core.errors import RecipeError
from plateaux.core.imports import optional_import

NMS = "RuntimeError('operator torchvision::nms does not exist')"
WRAPPED = f"try:\n    raise {NMS}\nexcept RuntimeError as error:\n    raise ModuleNotFoundError('wrapped') from error"
OPERATORS = Path(__file__).parents[1] / "torchvision_operators"


@pytest.mark.parametrize(
    ("name", "what"), [("absent_one", "absent_one is not installed"), ("visitor", "visitor needs absent_two, which is")]
)
def test_a_missing_library_is_named_with_its_extra(
    name: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "visitor.py").write_text("import absent_two")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(RecipeError, match=rf'{what}.*; run: pip install "plateaux\[demo\]"'):
        optional_import(name, extra="demo")


@pytest.mark.parametrize("code", [f"raise {NMS}", WRAPPED, WRAPPED.replace(" from error", "")])
def test_an_incompatible_torchvision_is_named_with_the_version_of_torch(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "visitor.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(imports, "version", {"torch": "2.13.0+cpu", "torchvision": "0.28.0"}.__getitem__)
    with pytest.raises(RecipeError, match=r"visitor needs torchvision, .* 0\.28\.0\) does not fit torch 2\.13\.0") as e:
        optional_import("visitor", extra="vision")
    assert 'pip install "torch==2.13.0+cpu" torchvision --index-url' in str(e.value)


@pytest.mark.parametrize("error", [NMS.replace("Runtime", "Value"), NMS.replace("torchvision", "other")])
def test_another_error_passes_through_unchanged(error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "visitor.py").write_text(f"raise {error}")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises((ValueError, RuntimeError), match="nms does not exist") as e:
        optional_import("visitor", extra="vision")
    assert repr(e.value) == error


def test_an_incompatible_torchvision_is_detected_when_transformers_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real transformers imports torchvision with its first model, and raises an error that does not name it."""
    for name, code in {"transformers": "", "torchvision": f"raise {NMS}"}.items():
        monkeypatch.delitem(sys.modules, name, raising=False)
        (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(imports, "version", str)
    with pytest.raises(RecipeError, match="transformers needs torchvision"):
        optional_import("transformers", extra="text")
    del sys.modules["transformers"]


@pytest.mark.process
def test_processes_of_the_tests_declare_the_operators_only_when_torchvision_is_imported(tmp_path: Path) -> None:
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text("from . import _meta_registrations")
    (package / "_meta_registrations.py").write_text(
        "import torch\nfor name in ('nms', 'qnms'): torch.library.register_fake(f'torchvision::{name}')(print)"
    )
    (tmp_path / "sitecustomize.py").write_text("print('another sitecustomize')")
    code = "import sys; print('torch' in sys.modules); import torchvision; print('torch' in sys.modules)"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(OPERATORS), str(tmp_path)])}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["another sitecustomize", "False", "True"], done.stderr
