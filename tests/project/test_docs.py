"""Documentation: Python blocks run, commands parse, links exist, figures have alt text, generated pages are current.

In a page, a block with a title (```python title="mine.py") is a file of that name; a Python block without one is run
as a script in the folder that contains those files. The folder also contains the run `runs/quickstart`.
Every test looks at all pages and reports all problems at once.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import shutil
import subprocess
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

import plateaux
from plateaux.cli.main import FILES, KINDS, app
from plateaux.config.builtin_recipes import recipe_file
from plateaux.core import registry
from plateaux.core.formatting import split_names
from plateaux.errors import PlateauxError
from plateaux.evaluation.metric_specs import get_metrics
from plateaux.loss_landscape.probe import get_probes

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
LINKED = [*PAGES, *(ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"))]
FENCE = re.compile(r"^```(\w*)(?: title=\"([^\"]+)\")?\n(.*?)^```", re.DOTALL | re.MULTILINE)
SHELLS = ("bash", "console", "sh")
KINDS_OF_PLUGINS = (
    registry.method, registry.metric, registry.probe, registry.dataset, registry.model, registry.executor
)  # fmt: skip


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    language: str
    title: str
    text: str
    line: int


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [Block(m[1], m[2] or "", m[3], text[: m.start()].count("\n") + 2) for m in FENCE.finditer(text)]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT)) if page.is_relative_to(ROOT) else page.name


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a short run of the quickstart."""
    root = tmp_path_factory.mktemp("docs") / "quickstart"
    plateaux.train(plateaux.Recipe.load(recipe_file("quickstart"), ["train.epochs=2"]), root)
    return root


@contextlib.contextmanager
def working_folder(path: Path, quickstart: Path) -> Iterator[Path]:
    """Work in a new folder that modules can be imported from, and unregister their plug-ins afterwards."""
    shutil.copytree(quickstart, path / "runs" / "quickstart")
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        for kind in KINDS_OF_PLUGINS:
            kind.names()  # registers the built-in plug-ins
            patch.setattr(kind, "_factories", dict(kind._factories))
        patch.chdir(path)
        patch.syspath_prepend(str(path))
        yield path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(path)):
            del sys.modules[name]


@pytest.fixture
def folder(tmp_path: Path, quickstart: Path) -> Iterator[Path]:
    with working_folder(tmp_path / "work", quickstart) as path:
        yield path


def run_page(page: Path, folder: Path) -> list[dict[str, Any]]:
    """Run the Python blocks of a page, each in a new namespace, and return the namespaces."""
    page_blocks = blocks(page)
    for block in page_blocks:
        if block.title:
            (folder / block.title).write_text(block.text, encoding="utf-8")
    spaces = []
    for block in page_blocks:
        if block.language == "python" and not block.title:
            space: dict[str, Any] = {"__name__": "__main__"}
            exec(compile("\n" * (block.line - 1) + block.text, str(page), "exec"), space)
            spaces.append(space)
    return spaces


def failing_pages(pages: list[Path], tmp_path: Path, quickstart: Path) -> dict[str, str]:
    """Run every page in a folder of its own, and return the errors by page and line."""
    problems = {}
    for number, page in enumerate(pages):
        with working_folder(tmp_path / str(number), quickstart) as folder:
            try:
                run_page(page, folder)
            except Exception as error:  # a page may raise anything; all pages are reported
                lines = [at.lineno for at in traceback.extract_tb(error.__traceback__) if at.filename == str(page)]
                problems[f"{name_of(page)}:{lines[-1] if lines else '?'}"] = f"{type(error).__name__}: {error}"
    return problems


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(1200)
def test_every_python_block_runs(tmp_path: Path, quickstart: Path) -> None:
    assert failing_pages(PAGES, tmp_path, quickstart) == {}


def test_a_block_with_an_error_is_reported_with_its_line(tmp_path: Path, quickstart: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A page\n\n```python\nimport plateaux\nplateaux.nothing\n```\n", encoding="utf-8")
    problems = failing_pages([page, page], tmp_path, quickstart)
    assert list(problems) == ["page.md:5"]
    assert "nothing" in problems["page.md:5"]


def test_the_readme_begins_with_one_example_whose_ensemble_is_better_than_every_member() -> None:
    first, printed = [block for block in blocks(PAGES[0]) if block.language in ("python", "text")][:2]
    assert "plateaux.fit(" in first.text
    assert "plateaux.load_predictor(run)" in first.text
    rows = {
        cells[0].strip(): cells[1:] for cells in re.findall(r"^│(.*?)│\s*([\d.]+).*?│\s*([\d.]+)", printed.text, re.M)
    }
    members = [row for name, row in rows.items() if name.startswith("member")]
    accuracy, nll = (float(value) for value in rows["ensemble (mean probability)"])
    assert len(members) == 5
    assert all(accuracy > float(member[0]) and nll < float(member[1]) for member in members)


def test_the_first_examples_need_no_package_beyond_the_demo_extra() -> None:
    for page in (PAGES[0], DOCS / "guides" / "arrays.md"):
        first = next(block for block in blocks(page) if block.language == "python")
        imported = set(re.findall(r"^(?:import|from) (\w+)", first.text, re.MULTILINE))
        assert imported <= {"plateaux", "sklearn", "torch"}
        assert "as_frame" not in first.text  # which needs pandas


# Pages about plug-ins and the run folder.


def test_the_example_methods_train_the_same_weights_on_every_executor(folder: Path) -> None:
    for block in blocks(DOCS / "guides" / "extend.md"):
        if block.title:
            (folder / block.title).write_text(block.text, encoding="utf-8")
    data = {"name": "moons", "samples": 96, "batch_size": 32}
    for name in ("two_steps:look_ahead", "apart:apart"):
        recipe = plateaux.Recipe.from_dict(
            {
                "members": 2,
                "data": data,
                "model": {"name": "mlp"},
                "method": {"name": name},
                "train": {"epochs": 2, "precision": "fp64"},
            }
        )
        out = name.partition(":")[0]
        weights = {}
        for mode in ("loop", "vmap", "offload"):
            run = plateaux.train(recipe.replaced(executor={"mode": mode}), f"runs/{out}-{mode}")
            weights[mode] = [run.weights(number) for number in range(2)]
        same = recipe.replaced(method={"name": "deep_ensemble"}, data={"shuffle": "shared"})
        plain = plateaux.train(same, f"runs/{out}-plain")
        for number in range(2):
            for parameter, value in weights["loop"][number].items():
                assert torch.equal(value, weights["offload"][number][parameter])
                torch.testing.assert_close(value, weights["vmap"][number][parameter], rtol=0, atol=1e-12)
            assert not torch.allclose(weights["loop"][number]["1.weight"], plain.weights(number)["1.weight"])


def test_the_extragradient_example_on_a_parabola_has_a_closed_form(folder: Path) -> None:
    run_page(DOCS / "guides" / "extend.md", folder)
    import two_steps

    # f(w) = w^2 / 2 has the gradient w, and w - lr w one step ahead: 3 - 0.1 * 3.
    update = two_steps.extragradient({"w": torch.tensor([3.0])}, plateaux.StepContext(size=1, lr=0.1, peak_lr=0.1))
    assert next(update).at is None
    ahead = update.send({"w": torch.tensor([3.0])})
    assert ahead.at is not None
    with pytest.raises(StopIteration) as end:
        update.send(ahead.at)
    torch.testing.assert_close(end.value.value["w"], torch.tensor([2.7]))


def test_loading_members_without_plateaux_gives_the_same_probabilities(folder: Path) -> None:
    page = DOCS / "concepts" / "run-folder.md"
    space = run_page(page, folder)[0]
    expected = plateaux.load_predictor("runs/quickstart").ensemble.predict(space["images"])
    torch.testing.assert_close(space["probabilities"], expected)
    block = next(block for block in blocks(page) if block.language == "python")
    assert "plateaux" not in block.text


# Commands.


def commands(page: Path) -> list[list[str]]:
    """Return the arguments of every `plateaux ...` command in shell blocks, and in text if it has arguments."""
    text = page.read_text(encoding="utf-8")
    lines = [line for block in blocks(page) if block.language in SHELLS for line in block.text.splitlines()]
    lines += re.findall(r"(?<!`)`((?:[A-Z_]+=\S+ )?plateaux \w+ [^`\n]+)`", FENCE.sub("", text))
    results: list[list[str]] = []
    for line in lines:
        words = shlex.split(line.removeprefix("$ ").removesuffix(" &"), comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words = words[1:]
        if words[:1] == ["plateaux"]:
            results.append(words[1:])
        elif "-m" in words and "plateaux" in words:
            results.append(words[words.index("plateaux") + 1 :])
    return [arguments for arguments in results if arguments not in (["--help"], ["--version"])]


def parse_command(arguments: list[str]) -> tuple[str, dict[str, Any]]:
    """Return the name and the parameters of a command, without running it."""
    command: Any = typer.main.get_command(app)
    context, name = command.make_context("plateaux", list(arguments)), ""
    while hasattr(command, "commands"):
        word, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        context, name = command.make_context(word, list(rest), parent=context), f"{name} {word}".strip()
    return name, context.params


def check_command(arguments: list[str], files: set[str]) -> None:
    """Parse a command, and look up the recipe, metrics, probes, and plug-in kind that it names."""
    name, params = parse_command(arguments)
    recipe = params.get("recipe")
    is_name = recipe is not None and recipe.lower() == recipe and not recipe.startswith("runs/")  # a run folder
    if is_name and recipe not in files and not (ROOT / recipe).is_file():
        plateaux.Recipe.load(recipe_file(recipe), params["changes"] or [])
    if name == "list":
        assert params["kind"] in {*KINDS, *FILES}
    for key, get in (("metrics", get_metrics), ("probes", get_probes)):
        names = [word for word in split_names(params.get(key) or "") if ":" not in word]
        assert not names or get(names)


def test_every_command_is_valid() -> None:
    problems = []
    for page in PAGES:
        files = {block.title for block in blocks(page)}
        for arguments in commands(page):
            try:
                check_command(arguments, files)
            except (Exception, SystemExit) as error:
                problems.append(f"{name_of(page)}: plateaux {shlex.join(arguments)}: {error}")
    assert problems == []


@pytest.mark.parametrize("command", ["tran quickstart", "train", "train quickstart --sets a=1", "recipe chek x"])
def test_an_invalid_command_is_rejected(command: str) -> None:
    with pytest.raises((Exception, SystemExit)):
        check_command(command.split(), set())


# Links, figures, recipes, and generated pages.


def test_every_link_has_a_target_and_every_figure_has_alt_text() -> None:
    problems = []
    for page in LINKED:
        text = FENCE.sub("", page.read_text(encoding="utf-8"))
        targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"(?:src|href)=\"([^\"]+)\"", text)
        local = [target.partition("#")[0] for target in targets if not re.match(r"[a-z]+:|#", target)]
        problems += [f"{name_of(page)}: {target}" for target in local if not (page.parent / target).exists()]
        figures = re.findall(r"!\[([^\]]*)\]\(", text)
        figures += [(re.findall(r"\balt=\"([^\"]*)\"", tag) or [""])[0] for tag in re.findall(r"<img\b[^>]*>", text)]
        problems += [f"{name_of(page)}: figure with alt text {alt!r}" for alt in figures if len(alt.strip()) < 10]
    assert problems == []


def test_the_navigation_names_every_page_once() -> None:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    listed = re.findall(r"(\S+\.(?:md|ipynb))$", nav, re.MULTILINE)
    pages = [page.relative_to(DOCS) for page in (*PAGES[1:], *DOCS.rglob("*.ipynb"))]
    papers = ROOT / "papers"  # docs/papers_pages.py adds its pages to the site
    pages += [page.relative_to(ROOT) for page in (*papers.glob("*.md"), *papers.glob("[a-z]*/*.md"))]
    assert sorted(listed) == sorted(map(str, pages))


def test_toml_blocks_are_recipes(folder: Path) -> None:
    problems = []
    for page in PAGES:
        for block in blocks(page):
            if block.language == "toml":
                try:
                    plateaux.Recipe.parse(block.text, where=name_of(page))
                except PlateauxError as error:
                    problems.append(str(error))
    assert problems == []


def test_the_pages_name_every_package_probe_and_public_name() -> None:
    text = FENCE.sub("", (DOCS / "contributing" / "architecture.md").read_text(encoding="utf-8"))
    packages = {path.name for path in (ROOT / "src" / "plateaux").iterdir() if path.is_dir()}
    paths = [path for path in re.findall(r"`([a-z_]+/[\w/.]*)", text) if path.partition("/")[0] in packages]
    problems = [f"architecture.md: {path}" for path in paths if not (ROOT / "src" / "plateaux" / path).exists()]
    landscape = (DOCS / "guides" / "loss-landscape.md").read_text(encoding="utf-8")
    problems += [f"loss-landscape.md: {name}" for name in registry.probe.names() if f"\n| `{name}` |" not in landscape]
    reference = "".join(page.read_text(encoding="utf-8") for page in (DOCS / "reference" / "api").glob("*.md"))
    documented = set(re.findall(r"^::: plateaux\.(\w+)$|`plateaux\.(\w+)`", reference, re.MULTILINE))
    problems += [f"api: {name}" for name in plateaux.__all__ if not documented & {(name, ""), ("", name)}]
    assert len(paths) > 10
    assert problems == []


def test_generated_pages_and_pictures_are_current() -> None:
    problems = []
    for script in ("recipe_page", "cli_page", "architecture_picture", "sharpbalance_picture"):
        command = [sys.executable, str(DOCS / f"make_{script}.py"), "--check"]
        done = subprocess.run(command, capture_output=True, text=True)
        problems += [done.stderr] if done.returncode else []
    assert problems == []


def test_diagrams_have_dark_colors() -> None:
    pictures = [(DOCS / "images" / f"{name}.svg") for name in ("architecture", "joint-step", "sharpbalance")]
    assert [
        path.name for path in pictures if "prefers-color-scheme: dark" not in path.read_text(encoding="utf-8")
    ] == []
