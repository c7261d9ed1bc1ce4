"""Guests are imported in processes of their own, because a mended torchvision stays mended."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from textwrap import dedent

import pytest

import plateaux

SOURCE = Path(plateaux.__file__ or plateaux.__path__[0])
HOME = str(SOURCE.parent.parent if SOURCE.suffix else SOURCE.parent)
needs_timm = pytest.mark.skipif(find_spec("timm") is None, reason="timm is not installed")
needs_transformers = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")

DECLARED = "hasattr(torch.ops.torchvision, 'nms')"
BROKEN_TORCHVISION = """
    import torch
    from . import early
    torch.library.register_fake("torchvision::nms")(lambda dets, scores, iou_threshold: dets)
    torch.library.register_fake("torchvision::qnms")(lambda dets, scores, iou_threshold: dets)
"""
VISITOR = {"visitor/__init__.py": "from . import early, late", "visitor/early.py": "", "visitor/late.py": ""}


def run(code: str, *, files: dict[str, str] | None = None, at: Path | None = None) -> str:
    """Run code in a fresh process that finds `files` before everything else, and return what it printed."""
    for name, text in (files or {}).items():
        assert at is not None
        (at / name).parent.mkdir(parents=True, exist_ok=True)
        (at / name).write_text(dedent(text))
    path = os.pathsep.join([*([str(at)] if at else []), HOME])
    script = "import torch\nfrom plateaux.core.optional import optional_import\n" + dedent(code)
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@needs_timm
def test_timm_builds_a_model_beside_the_torchvision_that_is_here() -> None:
    assert (
        run("print(optional_import('timm', extra='timm').create_model('resnet10t', num_classes=3).num_classes)") == "3"
    )


@needs_transformers
def test_transformers_gives_its_models_when_it_was_imported_as_a_guest() -> None:
    code = """
        optional_import("transformers", extra="text")
        from transformers import BertModel
        print(BertModel.__name__)
    """
    assert run(code) == "BertModel"


@needs_transformers
def test_transformers_imported_before_is_the_same_module_after() -> None:
    code = """
        import sys
        import transformers
        try:
            from transformers import BertModel
        except ModuleNotFoundError:
            pass
        # Where torchvision works, the line above succeeds, and transformers has replaced its own module
        # (`direct_transformers_import` in its processing_utils executes its `__init__` again).
        before = sys.modules["transformers"]
        print(optional_import("transformers", extra="text") is before)
        from transformers import BertModel
    """
    assert run(code) == "True"


@needs_timm
def test_a_spawned_process_mends_for_itself(tmp_path: Path) -> None:
    worker = """
        from plateaux.core.optional import optional_import

        def work(_):
            return optional_import("timm", extra="timm").__name__
    """
    code = """
        from multiprocessing import get_context
        from work import work
        with get_context("spawn").Pool(1) as pool:
            print(pool.map(work, [0])[0])
    """
    assert run(code, files={"work.py": worker}, at=tmp_path) == "timm"


def test_a_broken_torchvision_is_declared_and_the_guest_imported_afresh(tmp_path: Path) -> None:
    files = {**VISITOR, "torchvision/__init__.py": BROKEN_TORCHVISION, "torchvision/early.py": "print('early')"}
    files["visitor/late.py"] = "import torchvision"
    code = f"""
        visitor = optional_import("visitor", extra="none")
        print({DECLARED}, visitor.late.torchvision.__name__)
        print(optional_import("visitor", extra="none") is visitor)
    """
    assert run(code, files=files, at=tmp_path).split() == ["early", "early", "True", "torchvision", "True"]


def test_the_error_is_found_behind_the_error_that_it_caused(tmp_path: Path) -> None:
    files = {**VISITOR, "torchvision/__init__.py": BROKEN_TORCHVISION, "torchvision/early.py": ""}
    files["visitor/late.py"] = """
        try:
            import torchvision
        except RuntimeError as error:
            raise ImportError("could not import my parts") from error
    """
    assert run("print(optional_import('visitor', extra='none').late.torchvision.__name__)", files=files, at=tmp_path)


def test_a_working_torchvision_is_left_alone(tmp_path: Path) -> None:
    files = {**VISITOR, "torchvision/__init__.py": "fine = True", "visitor/late.py": "import torchvision"}
    code = f"print(optional_import('visitor', extra='none').late.torchvision.fine, {DECLARED})"
    assert run(code, files=files, at=tmp_path) == "True False"


def test_another_error_passes_through_unchanged(tmp_path: Path) -> None:
    errors = [
        "RuntimeError('operator torchaudio::x does not exist')",
        "ValueError('operator torchvision::nms does not exist')",
        "ImportError('no such name')",
    ]
    code = f"""
        for name in ("visitor0", "visitor1", "visitor2"):
            try:
                optional_import(name, extra="none")
            except Exception as error:
                print(repr(error), {DECLARED})
    """
    files = {f"visitor{i}.py": f"raise {error}" for i, error in enumerate(errors)}
    assert run(code, files=files, at=tmp_path).splitlines() == [f"{error} False" for error in errors]


def test_a_missing_guest_says_how_to_install_it(tmp_path: Path) -> None:
    code = """
        from plateaux.core.errors import RecipeError
        for name in ("nobody_home", "visitor"):
            try:
                optional_import(name, extra="house")
            except RecipeError as error:
                print(error)
    """
    said = run(code, files={**VISITOR, "visitor/late.py": "import nothing_there"}, at=tmp_path).splitlines()
    assert said == [
        'nobody_home is not installed; run: pip install "plateaux[house]"',
        'visitor needs nothing_there, which is missing; run: pip install "plateaux[house]"',
    ]
