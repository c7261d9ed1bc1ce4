"""Project rules: file sizes, versions, import layers, reasons for dependencies, no execution of untrusted code."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

import plateaux

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = {name: packages for name, packages in PROJECT["optional-dependencies"].items() if name != "all"}
CUDA_ONLY_AT_MOST = 40
WRITE_MODES = {f"{mode}{kind}" for mode in ("w", "x", "a", "r+", "w+") for kind in ("", "b", "t")} | {"r+b", "rb+"}


def test_no_source_file_is_longer_than_400_lines() -> None:
    files = [*SOURCES, *(ROOT / "benchmarks").glob("*.py")]
    lengths = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    assert {name: length for name, length in lengths.items() if length > 400} == {}


def test_few_lines_are_excluded_from_coverage_for_cuda() -> None:
    marked = [
        line for path in SOURCES for line in path.read_text(encoding="utf-8").splitlines() if "# cuda-only" in line
    ]
    assert len(marked) <= CUDA_ONLY_AT_MOST, "more of the package can only be checked on CUDA than was agreed"


def test_only_cuda_lines_are_excluded_from_coverage() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in SOURCES)
    assert not re.search(r"pragma:\s*no\s*cover", text)


def test_changelog_and_citation_name_the_version_of_the_package() -> None:
    newest = re.search(r"^## \[[^\]]+\].*$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert newest is not None
    assert re.findall(r"\d+\.\d+\.\d+", newest[0])[:1] == [plateaux.__version__]
    assert f"\nversion: {plateaux.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


@pytest.mark.parametrize("package", [re.split(r"[\[<>=!~ ]", line)[0] for line in PROJECT["dependencies"]])
def test_the_install_page_gives_a_reason_for_each_core_dependency(package: str) -> None:
    assert any(package in words(first) and len(words(reason)) >= 3 for first, *_, reason in install_rows())


@pytest.mark.parametrize("extra", EXTRAS)
def test_the_install_page_gives_a_reason_for_each_extra_and_names_its_packages(extra: str) -> None:
    rows = [row for row in install_rows() if extra in words(row[0]) and len(words(row[-1])) >= 3]
    assert rows, f"no row of the tables on the install page starts with the extra {extra!r} and ends with a reason"
    packages = [] if extra == "dev" else [re.split(r"[\[<>=!~ ]", line)[0] for line in EXTRAS[extra]]
    assert [name for name in packages if not any(name in words(" ".join(row)) for row in rows)] == []


def test_readme_has_a_quickstart_that_ci_can_run() -> None:
    block = re.search(r"<!-- quickstart -->\s*```\w*\n(.*?)```", readme(), re.DOTALL)
    assert block is not None
    assert re.match(r"pip install [\"']?plateaux(\[[a-z,]+\])?[\"']?\n", block[1])


def test_imports_point_down_the_layers() -> None:
    command = "from importlinter.cli import lint_imports_command as run; run()"
    done = subprocess.run([sys.executable, "-c", command, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_untrusted_recipe_or_run_cannot_execute_code() -> None:
    found = {path.name: list(dangerous_calls(path.read_text(encoding="utf-8"))) for path in SOURCES}
    assert {name: calls for name, calls in found.items() if calls} == {}


def test_only_one_module_starts_processes() -> None:
    """`distributed.subprocesses` keeps every process from importing code from the current folder."""
    found = {str(path.relative_to(ROOT)): list(process_starts(path.read_text(encoding="utf-8"))) for path in SOURCES}
    allowed = "src/plateaux/distributed/subprocesses.py"
    assert found.pop(allowed)
    # They start processes through a library, inside `protected_children`.
    assert found.pop("src/plateaux/distributed/process_pool.py") == ["context.Process"]
    assert found.pop("src/plateaux/distributed/ray_cluster.py") == ["ray.init"]
    assert {name: starts for name, starts in found.items() if starts} == {}


@pytest.mark.parametrize(
    ("line", "starts"),
    [
        ("import subprocess", True),
        ("from subprocess import run", True),
        ("import asyncio.subprocess", True),
        ("from torch import multiprocessing", False),
        ("torch.multiprocessing.spawn(f)", True),
        ("os.system('ls')", True),
        ("os.posix_spawn('ls', [], {})", True),
        ("os.execv('ls', [])", True),
        ("os.fork()", True),
        ("context.Process(target=f)", True),
        ("ProcessPoolExecutor()", True),
        ("ray.init('auto')", True),
        ("os.getpid()", False),
        ("process.start()", False),
    ],
)
def test_the_search_for_process_starts_finds_them(line: str, starts: bool) -> None:
    assert bool(list(process_starts(line))) is starts


def test_no_test_can_fail_because_the_machine_is_slow() -> None:
    """Hypothesis has one profile, without a deadline; no test sets a deadline of its own."""
    assert hypothesis.settings.default is not None
    assert hypothesis.settings.default.deadline is None
    files = [path for path in (ROOT / "tests").rglob("*.py") if path.name != "conftest.py" and path != Path(__file__)]
    assert [path.name for path in files if re.search(r"\bdeadline=", path.read_text(encoding="utf-8"))] == []


def test_only_the_storage_package_writes_files() -> None:
    """Atomic writes stay atomic: every other module uses a store or `storage.atomic.write_atomic`."""
    others = [path for path in SOURCES if path.parent.name != "storage" and path.name != "testing.py"]
    found = {str(path.relative_to(ROOT)): list(file_writes(path.read_text(encoding="utf-8"))) for path in others}
    assert {name: calls for name, calls in found.items() if calls} == {}


@pytest.mark.parametrize(
    ("line", "writes"),
    [
        ("path.write_text(text)", True),
        ("path.write_bytes(content)", True),
        ("folder.mkdir(parents=True)", True),
        ("path.replace(target)", True),
        ("path.rename(target)", True),
        ("os.replace(a, b)", True),
        ("os.makedirs(a)", True),
        ("shutil.copy(a, b)", True),
        ("open(path, 'w')", True),
        ("path.open('ab')", True),
        ("path.open(mode='x')", True),
        ("figure.savefig(path)", True),
        ("torch.save(state, path)", True),
        ("np.save(path, array)", True),
        ("text.replace('a', 'b')", False),
        ("replace(options, seed=1)", False),
        ("open(path)", False),
        ("path.open('rb')", False),
        ("figure.savefig(buffer, format='png')", False),
    ],
)
def test_the_search_for_file_writes_finds_them(line: str, writes: bool) -> None:
    assert bool(list(file_writes(line))) is writes


@pytest.mark.parametrize(
    ("line", "dangerous"),
    [
        ("eval(text)", True),
        ("exec(text)", True),
        ("pickle.load(file)", True),
        ("pickle.loads(data)", True),
        ("from pickle import loads", True),
        ("torch.load(path)", True),
        ("torch.load(path, weights_only=False)", True),
        ("np.load(path, allow_pickle=True)", True),
        ("model.eval()", False),
        ("torch.load(path, weights_only=True)", False),
        ("np.load(path)", False),
    ],
)
def test_the_search_for_dangerous_calls_finds_them(line: str, dangerous: bool) -> None:
    assert bool(list(dangerous_calls(line))) is dangerous


def dangerous_calls(source: str) -> Iterator[str]:
    """Yield what in a source could run code that came as data."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module == "pickle":
            names = {alias.name for alias in node.names} & {"load", "loads"}
            yield from (f"{node.lineno}: from pickle import {name}" for name in names)
        elif isinstance(node, ast.Call) and _is_dangerous(node):
            yield f"{node.lineno}: {ast.unparse(node)}"


def _is_dangerous(call: ast.Call) -> bool:
    function = ast.unparse(call.func)
    options = {word.arg: ast.unparse(word.value) for word in call.keywords}
    if function == "torch.load":
        return options.get("weights_only") != "True"
    return function in {"eval", "exec", "pickle.load", "pickle.loads"} or options.get("allow_pickle") == "True"


def process_starts(source: str) -> Iterator[str]:
    """Yield the imports and calls that start other programs or processes."""
    functions = re.compile(r"os\.(system|popen|fork\w*|posix_spawn\w*|spawn\w+|exec\w+)|ray\.init")
    names = {"Process", "ProcessPoolExecutor", "Popen", "spawn", "create_subprocess_exec", "create_subprocess_shell"}
    for node in ast.walk(ast.parse(source)):
        if any("subprocess" in name.split(".") for name in _imported(node)):
            yield ast.unparse(node)
        elif isinstance(node, ast.Call):
            function = ast.unparse(node.func)
            if functions.fullmatch(function) or function.rpartition(".")[2] in names:
                yield function


def file_writes(source: str) -> Iterator[str]:
    """Yield the calls that create, rename or write files."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and _is_file_write(node):
            yield f"{node.lineno}: {ast.unparse(node)[:80]}"


def _is_file_write(call: ast.Call) -> bool:
    function = ast.unparse(call.func)
    method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    options = {word.arg: word.value for word in call.keywords}
    if method == "replace":  # Path.replace takes one argument, str.replace two
        return len(call.args) == 1 or function == "os.replace"
    if method == "savefig":  # into memory, the format must be given
        return "format" not in options
    if "open" in (method, function):
        modes = [*call.args[0 if method else 1 :][:1], *([options["mode"]] if "mode" in options else [])]
        return any(isinstance(mode, ast.Constant) and mode.value in WRITE_MODES for mode in modes)
    names = {"write_text", "write_bytes", "mkdir", "rename", "symlink_to"}
    return (
        method in names
        or function.startswith(("shutil.", "os.mkdir", "os.makedirs", "os.rename"))
        or function in ("torch.save", "np.save", "np.savetxt")
    )


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""]
    if isinstance(node, ast.Call) and node.args and ast.unparse(node.func).endswith("import_module"):
        return [ast.unparse(node.args[0]).strip("'")]
    return []


def readme() -> str:
    path = ROOT / "README.md"
    assert path.exists(), "README.md is missing; the package cannot be built without it"
    return path.read_text(encoding="utf-8")


def install_rows() -> list[list[str]]:
    """Return the cells of every table row of the install page."""
    page = ROOT / "docs" / "get-started" / "install.md"
    lines = [line.strip() for line in page.read_text(encoding="utf-8").splitlines()]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]


def words(cell: str) -> list[str]:
    return re.findall(r"[\w-]+", cell)
