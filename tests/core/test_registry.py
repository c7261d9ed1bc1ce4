"""Plug-ins are found by name, imported only if they are decorated or allowed, and never replace each other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from plateaux.core.errors import UnknownNameError, UntrustedCodeError
from plateaux.core.registry import Registry, dataset, executor, method, metric, model

KINDS = [method, metric, dataset, model, executor]


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path; modules imported from it are removed afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def write(folder: Path, name: str, head: str, decorator: str = "", body: str = "def build(): ...") -> Path:
    """Write a module that creates a file when it is imported, and return the path of that file."""
    trace = folder / f"{name}.imported"
    file = folder / f"{name.replace('.', '/')}.py"
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"{head}\nfrom pathlib import Path\nPath({str(trace)!r}).touch()\n{decorator}\n{body}\n")
    return trace


@pytest.mark.parametrize("registry", KINDS, ids=lambda r: r.kind)
def test_every_plug_in_is_found_and_has_a_description(registry: Registry) -> None:
    assert registry.names()
    for name, words in registry.describe().items():
        assert words.endswith(".") or words.endswith(":"), name
        assert words[0].isupper() or words[0].isdigit(), name
        if not name.endswith("<name>"):
            assert registry.is_registered(registry.get(name))


def test_an_unknown_name_is_rejected_with_the_closest_name() -> None:
    with pytest.raises(UnknownNameError, match=r"There is no method called 'smam'; did you mean 'sam'.*\?"):
        method.get("smam")
    with pytest.raises(UnknownNameError, match="There is no executor called 'zzz'; allowed: local, mesh"):
        executor.get("zzz")


def test_a_factory_is_registered_under_its_own_name_a_given_name_or_a_prefix() -> None:
    own = Registry("toy", "plateaux.methods", group="plateaux.toys")
    own._scanned = True

    @own
    def first() -> int:
        """The first."""
        return 1

    @own("zweites")
    def second() -> int:
        return 2

    @own(prefix="hub:")
    def third(rest: str, *, times: int = 1) -> str:
        return rest * times

    assert own.names() == ["first", "hub:<name>", "zweites"]
    assert (own.get("first")(), own.get("zweites")(), own.get("hub:ab")(times=2)) == (1, 2, "abab")
    assert own.describe() == {"first": "The first.", "hub:<name>": "", "zweites": ""}
    with pytest.raises(UnknownNameError):
        own.get("hub:")


UNDECORATED = [
    ("import plateaux", "", "def build(): ..."),
    ("import plateaux", "@plateaux.method", "def build(): ..."),  # decorated as another kind
    ("import plateaux", "@plateaux.model", "def other(): ..."),  # another function is decorated
    ("import plateaux", "# @plateaux.model", "def build(): ..."),
    ("import plateaux", '"""@plateaux.model"""', "def build(): ..."),
    ("class plateaux:\n    model = staticmethod(lambda f: f)", "@plateaux.model", "def build(): ..."),  # not ours
    ("from elsewhere import model", "@model", "def build(): ..."),
    ("import plateaux", "if True:\n  pass\ndef outer():\n    @plateaux.model", "    def build(): ..."),
    ("import plateaux\nthis is no python", "@plateaux.model", "def build(): ..."),
]


@pytest.mark.parametrize(("head", "decorator", "body"), UNDECORATED)
def test_undecorated_code_is_not_imported(outside: Path, head: str, decorator: str, body: str) -> None:
    trace = write(outside, "unknown", head, decorator, body)
    with pytest.raises(
        UntrustedCodeError,
        match=r"'unknown:build' is not decorated with @plateaux\.model, so a recipe cannot call it\.",
    ):
        model.get("unknown:build")
    assert not trace.exists()
    assert "unknown" not in sys.modules


@pytest.mark.parametrize(
    "name", ["os:system", "builtins:exec", "sys:exit", "subprocess:run", "posix:system", "torch:load"]
)
def test_functions_of_installed_modules_cannot_be_called(name: str) -> None:
    with pytest.raises(UntrustedCodeError, match="so a recipe cannot call it"):
        model.get(name)


@pytest.mark.parametrize("name", [":build", "a..b:c", "no_such_module:build", "unknown.submodule:build", ".:x", "x:"])
def test_a_name_that_does_not_exist_is_rejected_without_an_import(outside: Path, name: str) -> None:
    trace = write(outside, "unknown", "")
    with pytest.raises((UntrustedCodeError, UnknownNameError)):
        model.get(name)
    assert not trace.exists()


DECORATED = [
    ("import plateaux", "@plateaux.model"),
    ("import plateaux", '@plateaux.model("another_name")'),
    ("import plateaux as p", "@p.model"),
    ("import plateaux.core.registry", "@plateaux.core.registry.model"),
    ("from plateaux import model", "@model"),
    ("from plateaux.core.registry import model as network", "@network"),
]


@pytest.mark.parametrize(("head", "decorator"), DECORATED)
def test_decorated_code_is_called_however_the_decorator_was_imported(outside: Path, head: str, decorator: str) -> None:
    trace = write(outside, "friend", head, decorator, "def build_of_a_friend(): return 5")
    found = model.get("friend:build_of_a_friend")
    assert trace.exists()
    assert found() == 5
    for name in ("build_of_a_friend", "another_name"):
        model._factories.pop(name, None)


def test_only_code_allowed_by_name_is_called(outside: Path) -> None:
    write(outside, "mine", "", "", "def build(): return 7")
    other = write(outside, "mine2", "")
    assert model.get("mine:build", allow=("mine",))() == 7
    with pytest.raises(UntrustedCodeError):
        model.get("mine2:build", allow=("mine",))
    assert not other.exists()
    with pytest.raises(UnknownNameError, match="'mine' has no function 'nothing'"):
        model.get("mine:nothing", allow=("mine",))


def test_a_package_is_not_imported_to_find_a_module_in_it(outside: Path) -> None:
    (outside / "pack").mkdir()
    (outside / "pack/__init__.py").write_text(
        f"from pathlib import Path\nPath({str(outside / 'pack.imported')!r}).touch()\n"
    )
    write(outside, "pack.inner", "")
    with pytest.raises(UntrustedCodeError):
        model.get("pack.inner:build")
    assert not list(outside.rglob("*.imported"))


def test_the_error_of_an_allowed_module_that_cannot_be_imported_states_the_reason(outside: Path) -> None:
    (outside / "broken.py").write_text("import a_package_that_is_not_there\n")
    with pytest.raises(
        UnknownNameError, match="'broken' cannot be imported: No module named 'a_package_that_is_not_there'"
    ):
        model.get("broken:build", allow=("broken",))


def test_a_second_plug_in_does_not_replace_the_first_of_the_same_name(outside: Path) -> None:
    write(outside, "rival", "import plateaux", "@plateaux.model", "def mlp(): return 'rival'")
    mine = model.get("mlp")
    with pytest.warns(
        UserWarning,
        match="The model 'mlp' is registered by plateaux.models.architectures.small already; .* as 'rival:mlp'",
    ):
        rival = model.get("rival:mlp")
    assert rival() == "rival"
    assert model.get("mlp") is mine


def installed(folder: Path, name: str, group: str, value: str) -> None:
    """Write the metadata of a package as pip would."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {value}\n")


@pytest.mark.process
def test_entry_points_of_other_packages_are_found_and_broken_ones_are_ignored(tmp_path: Path) -> None:
    write(
        tmp_path,
        "fine_plugin",
        "import plateaux",
        "@plateaux.method",
        'def theirs(loss):\n    "Their way."\n    return 9',
    )
    write(tmp_path, "rival_plugin", "import plateaux", "@plateaux.method", "def sam(loss): return 'rival'")
    (tmp_path / "broken_plugin.py").write_text("raise RuntimeError('broken')\n")
    installed(tmp_path, "fine", "plateaux.methods", "fine_plugin:theirs")
    installed(tmp_path, "rival", "plateaux.methods", "rival_plugin")
    installed(tmp_path, "broken", "plateaux.methods", "broken_plugin")
    program = (
        "import plateaux\n"
        "get, describe = plateaux.method.get, plateaux.method.describe\n"
        "print(get('theirs')(None), describe()['theirs'], get('sam').__module__)\n"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "9 Their way. plateaux.methods.sam\n"
    assert "The plug-in 'broken_plugin' is ignored because of RuntimeError('broken')" in done.stderr
    assert "The method 'sam' is registered by plateaux.methods.sam already" in done.stderr


@pytest.mark.process
def test_concurrent_threads_find_all_plug_ins() -> None:
    code = """
from concurrent.futures import ThreadPoolExecutor
from plateaux.core import registry
with ThreadPoolExecutor(4) as threads:
    found = list(threads.map(lambda _: registry.metric.names(), range(4)))
assert found[0] == found[1] == found[2] == found[3] != [], [len(each) for each in found]
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
