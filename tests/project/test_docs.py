"""Documentation: Python blocks run, commands parse, links exist, figures have alt text, generated pages are current.

In a page, a block with a title (```python title="mine.py") is a file of that name; a Python block without one is run
as a script in the folder that contains those files. The folder also contains the run `runs/quickstart`.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

import plateaux
from plateaux.cli import common
from plateaux.cli.main import KINDS, app
from plateaux.config.builtin_recipes import recipe_file
from plateaux.core import registry
from plateaux.core.formatting import split_names
from plateaux.evaluation.metric_specs import get_metrics
from plateaux.loss_landscape.probe import get_probes

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINKED = [*PAGES, *(ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"))]
FENCE = re.compile(r"^```(\w*)(?: title=\"([^\"]+)\")?\n(.*?)^```", re.DOTALL | re.MULTILINE)
SHELLS = ("bash", "console", "sh")


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


def for_pages(pages: list[Path]) -> Any:
    return pytest.mark.parametrize("page", pages, ids=lambda page: str(page.relative_to(ROOT)))


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a short run of the quickstart."""
    root = tmp_path_factory.mktemp("docs") / "quickstart"
    plateaux.train(plateaux.Recipe.load(recipe_file("quickstart"), ["train.epochs=2"]), root)
    return root


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quickstart: Path) -> Iterator[Path]:
    """Return an empty working folder that modules can be imported from, and unregister their plug-ins afterwards."""
    kinds = (registry.method, registry.metric, registry.probe, registry.dataset, registry.model, registry.executor)
    for kind in kinds:
        kind.names()  # registers the built-in plug-ins
        monkeypatch.setattr(kind, "_factories", dict(kind._factories))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    shutil.copytree(quickstart, tmp_path / "runs" / "quickstart")
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


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


@for_pages([page for page in PAGES if any(block.language == "python" for block in blocks(page))])
def test_every_python_block_of_a_page_runs(page: Path, folder: Path) -> None:
    run_page(page, folder)


def test_a_block_with_an_error_fails(tmp_path: Path, folder: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A page\n\n```python\nimport plateaux\nplateaux.nothing\n```\n", encoding="utf-8")
    with pytest.raises(AttributeError, match="nothing"):
        run_page(page, folder)


def test_the_readme_begins_with_at_most_twelve_lines_of_python_and_their_output() -> None:
    first, printed = [block for block in blocks(PAGES[0]) if block.language in ("python", "text")][:2]
    assert len([line for line in first.text.splitlines() if line.strip()]) <= 12
    assert "ensemble (mean probability)" in printed.text
    assert "plateaux.train(" in first.text
    assert "plateaux.evaluate(" in first.text


# Pages about plug-ins and the run folder.


@pytest.mark.parametrize("name", ["two_steps:look_ahead", "apart:apart"])
def test_the_example_methods_train_the_same_weights_on_every_executor(name: str, folder: Path) -> None:
    for block in blocks(ROOT / "docs" / "guides" / "add-a-method.md"):
        if block.title:
            (folder / block.title).write_text(block.text, encoding="utf-8")
    recipe = plateaux.Recipe.from_dict(
        {
            "members": 2,
            "data": {"name": "moons", "samples": 96, "batch_size": 32},
            "model": {"name": "mlp"},
            "method": {"name": name},
            "train": {"epochs": 2, "precision": "fp64"},
        }
    )
    weights = {}
    for mode in ("loop", "vmap", "offload"):
        run = plateaux.train(recipe.replaced(executor={"mode": mode}), f"runs/{mode}")
        weights[mode] = [run.weights(number) for number in range(2)]
    plain = plateaux.train(recipe.replaced(method={"name": "deep_ensemble"}, data={"shuffle": "shared"}), "runs/plain")
    for number in range(2):
        for parameter, value in weights["loop"][number].items():
            assert torch.equal(value, weights["offload"][number][parameter])
            torch.testing.assert_close(value, weights["vmap"][number][parameter], rtol=0, atol=1e-12)
        assert not torch.allclose(weights["loop"][number]["1.weight"], plain.weights(number)["1.weight"])


def test_the_extragradient_example_on_a_parabola_has_a_closed_form(folder: Path) -> None:
    run_page(ROOT / "docs" / "guides" / "add-a-method.md", folder)
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
    space = run_page(ROOT / "docs" / "concepts" / "run-folder.md", folder)[0]
    expected = plateaux.load_predictor("runs/quickstart").ensemble.predict(space["images"])
    torch.testing.assert_close(space["probabilities"], expected)
    block = next(block for block in blocks(ROOT / "docs" / "concepts" / "run-folder.md") if block.language == "python")
    assert "plateaux" not in block.text.replace("plateaux train", "")
    assert len([line for line in block.text.splitlines() if line.strip()]) <= 20


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
    return results


def parse_command(arguments: list[str]) -> tuple[str, dict[str, Any]]:
    """Return the name and the parameters of a command, without running it."""
    command: Any = typer.main.get_command(app)
    context, name = command.make_context("plateaux", list(arguments)), ""
    while hasattr(command, "commands"):
        word, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        context, name = command.make_context(word, list(rest), parent=context), f"{name} {word}".strip()
    return name, context.params


@for_pages([page for page in PAGES if commands(page)])
def test_every_command_of_a_page_is_valid(page: Path) -> None:
    files = {block.title for block in blocks(page)}
    for arguments in commands(page):
        if arguments in (["--help"], ["--version"]):
            continue
        name, params = parse_command(arguments)
        recipe = params.get("recipe")
        is_name = recipe is not None and recipe.lower() == recipe and not recipe.startswith("runs/")  # a run folder
        if is_name and recipe not in files and not (ROOT / recipe).is_file():
            plateaux.Recipe.load(recipe_file(recipe), params["changes"] or [])
        if name == "list":
            assert params["kind"] in {*KINDS, "recipes"}
        metrics = [word for word in split_names(params.get("metrics") or "") if ":" not in word]
        assert not metrics or get_metrics(metrics)
        probes = [word for word in split_names(params.get("probes") or "") if ":" not in word]
        assert not probes or get_probes(probes)


@pytest.mark.parametrize("command", ["tran quickstart", "train", "train quickstart --sets a=1", "recipe chek x"])
def test_an_invalid_command_is_rejected(command: str) -> None:
    with pytest.raises((Exception, SystemExit)):
        parse_command(command.split())


def test_the_readme_lists_every_command_and_exit_code() -> None:
    rows = [line.split("|") for line in PAGES[0].read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    listed = " ".join(row[1] for row in rows)
    commands = typer.main.get_command(app).commands.items()  # type: ignore[attr-defined]
    ours = [name for name, each in commands if not (each.callback and each.callback.__module__.startswith("plateaux_"))]
    missing = [name for name in ours if f"plateaux {name} " not in listed + " "]
    assert missing == []
    codes = {int(row[1]) for row in rows if row[1].strip().isdigit()}
    assert codes == {0, *(code for _, code in common.CODES)}


# Links, figures, and generated pages.


@for_pages(LINKED)
def test_every_relative_link_has_a_target(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"(?:src|href)=\"([^\"]+)\"", text)
    local = [target.partition("#")[0] for target in targets if not re.match(r"[a-z]+:|#", target)]
    assert [target for target in local if not (page.parent / target).exists()] == []


def test_the_navigation_names_every_page_once() -> None:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    listed = re.findall(r"(\S+\.(?:md|ipynb))$", nav, re.MULTILINE)
    pages = [page.relative_to(ROOT / "docs") for page in (*PAGES[1:], *(ROOT / "docs").rglob("*.ipynb"))]
    papers = ROOT / "papers"  # docs/papers_pages.py adds its pages to the site
    pages += [page.relative_to(ROOT) for page in (*papers.glob("*.md"), *papers.glob("[a-z]*/*.md"))]
    assert sorted(listed) == sorted(map(str, pages))


@pytest.mark.parametrize("page", ["contributing/architecture.md", "concepts/how-it-works.md"])
def test_every_path_of_a_page_about_the_code_exists(page: str) -> None:
    text = FENCE.sub("", (ROOT / "docs" / page).read_text(encoding="utf-8"))
    packages = {path.name for path in (ROOT / "src" / "plateaux").iterdir() if path.is_dir()}
    paths = [path for path in re.findall(r"`([a-z_]+/[\w/.]*)", text) if path.partition("/")[0] in packages]
    assert len(paths) > 10
    assert [path for path in paths if not (ROOT / "src" / "plateaux" / path).exists()] == []


def test_the_loss_landscape_guide_defines_every_probe() -> None:
    page = (ROOT / "docs" / "guides" / "loss-landscape.md").read_text(encoding="utf-8")
    assert [name for name in registry.probe.names() if f"\n| `{name}` |" not in page] == []


@pytest.mark.parametrize("script", ["recipe_page", "cli_page", "architecture_picture", "sharpbalance_picture"])
def test_a_generated_page_or_picture_is_current(script: str) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs" / f"make_{script}.py"), "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@for_pages(LINKED)
def test_every_figure_has_alt_text(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    figures = re.findall(r"!\[([^\]]*)\]\(", text)
    figures += [(re.findall(r"\balt=\"([^\"]*)\"", tag) or [""])[0] for tag in re.findall(r"<img\b[^>]*>", text)]
    assert [alt for alt in figures if len(alt.strip()) < 10] == []


@pytest.mark.parametrize("name", ["architecture", "joint-step", "sharpbalance"])
def test_a_diagram_has_dark_colors(name: str) -> None:
    assert "prefers-color-scheme: dark" in (ROOT / "docs" / "images" / f"{name}.svg").read_text(encoding="utf-8")


def test_the_terminal_picture_is_small_and_loads_no_external_resources() -> None:
    picture = (ROOT / "docs" / "images" / "terminal.svg").read_text(encoding="utf-8")
    assert len(picture) < 50_000
    assert not re.search(r"url\((?!#)|@import|<script|xlink:href", picture)


def test_the_api_reference_documents_every_public_name() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "reference" / "api").glob("*.md"))
    documented = set(re.findall(r"^::: plateaux\.(\w+)$|`plateaux\.(\w+)`", pages, re.MULTILINE))
    assert [name for name in plateaux.__all__ if not documented & {(name, ""), ("", name)}] == []


def test_toml_blocks_are_recipes(folder: Path) -> None:
    for page in PAGES:
        for block in blocks(page):
            if block.language == "toml":
                assert json.dumps(plateaux.Recipe.parse(block.text, where=str(page)).to_dict())
