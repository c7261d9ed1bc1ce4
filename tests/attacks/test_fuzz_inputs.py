"""Mutated recipes, studies, claims, and command lines: documented exit codes, no traceback, no hang."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from attacking import IS_LONG, attack

import plateaux
from plateaux.core.errors import PlateauxError

ROOT = Path(__file__).parents[2]
FILES = 3000 if IS_LONG else 150
COMMAND_LINES = 500 if IS_LONG else 40

SMALL = """
members = 2
seed = 3
[data]
name = "moons"
samples = 60
test_samples = 20
batch_size = 16
validation_split = 0.2
[model]
name = "mlp"
hidden_sizes = [4]
[method]
name = "sam"
rho = [0.05, 0.1]
[loss]
name = "cross_entropy"
label_smoothing = 0.1
[optimizer]
name = "SGD"
lr = 0.1
momentum = 0.9
weight_decay = 1e-4
[[lr_scheduler]]
name = "MultiStepLR"
milestones = [1, 2]
gamma = 0.1
[train]
epochs = 1
precision = "fp32"
select = "best:accuracy"
[run]
checkpoint_every_minutes = 5.0
[probe]
probes = ["average_l2"]
every = 1
samples = 8
"""
SHARPBALANCE = SMALL.replace(
    'name = "sam"\nrho = [0.05, 0.1]', 'name = "sharpbalance"\npartition_epoch = 1\ntop_k = 0.5'
)
SEARCH = SMALL + "\n[search.optimizer]\nlr = {low = 0.01, high = 0.5, log = true}\n"
STUDY = """
question = "Is it flat?"
repetitions = 2
baseline = {rho = 0.0}
[base]
members = 2
data = {name = "moons", samples = 60, test_samples = 20}
model = {name = "mlp", hidden_sizes = [4]}
method = {name = "sam", rho = 0.0}
train = {epochs = 1}
[grid]
"method.rho" = [0.0, 0.1]
[grid.network]
small = {model = {hidden_sizes = [4]}, each = {"optimizer.lr" = [0.1, 0.2]}}
large = {model = {hidden_sizes = [8]}}
[evaluate]
splits = ["test", "train@10"]
metrics = ["accuracy", "ece(bins=5)"]
[landscape]
probes = ["average_l2"]
samples = 8
"""
VALUES = (
    "nan", "inf", "-inf", "-1", "0", "1e308", "-1e-300", str(10**30), "9" * 400, "true", '""', '"x"', '"\\u0000"',
    '"../../x"', '"\\u001b[2J"', '"[red]x"', '"\\u202e"', "[]", "[[]]", "[1, 'a']", "{}", "{a = 1}", "{name = 3}",
    "1979-05-27", "07:32:00", '"' + "x" * 10_000 + '"', "[" * 200 + "]" * 200, "[" * 20_000 + "]" * 20_000,
    "[" + "0.1," * 5_000 + "]", '"torch.nn:Linear"', '"os:system"', '"best:"', '"best:nope"', "0.5", "2", "[0.1]",
)  # fmt: skip


def mutate(text: str, others: Sequence[str], rng: random.Random) -> bytes:
    """Return a file with one to three mutations."""
    content = text.encode()
    for _ in range(rng.randint(1, 3)):
        content = rng.choice(MUTATIONS)(content, others, rng)
    return content


def flip_byte(content: bytes, _: Sequence[str], rng: random.Random) -> bytes:
    at = rng.randrange(max(len(content), 1))
    return content[:at] + bytes([rng.randrange(256)]) + content[at + 1 :]


def change_lines(content: bytes, others: Sequence[str], rng: random.Random) -> bytes:
    lines = content.split(b"\n")
    at = rng.randrange(len(lines))
    other = rng.choice(rng.choice(others).split("\n")).encode()
    new = rng.choice([[], [lines[at]] * 2, [lines[at], other], [lines[at] + other], [lines[rng.randrange(len(lines))]]])
    return b"\n".join([*lines[:at], *new, *lines[at + 1 :]])


def change_value(content: bytes, _: Sequence[str], rng: random.Random) -> bytes:
    """Replace the value of a key; chosen most often, because the result is usually valid TOML."""
    lines = content.split(b"\n")
    places = [at for at, line in enumerate(lines) if b"=" in line]
    if places:
        at = rng.choice(places)
        lines[at] = lines[at].split(b"=")[0] + b"= " + rng.choice(VALUES).encode()
    return b"\n".join(lines)


def change_key(content: bytes, _: Sequence[str], rng: random.Random) -> bytes:
    words = [b"name", b"data", b"model", b"members", b"x", b"__class__", b"'\\u0000'", b'"a.b"', b"a.b.c", b"[", b""]
    lines = content.split(b"\n")
    at = rng.randrange(len(lines))
    lines[at] = rng.choice(words) + b"=" + lines[at].partition(b"=")[2]
    return b"\n".join(lines)


def cut(content: bytes, _: Sequence[str], rng: random.Random) -> bytes:
    return content[: rng.randrange(max(len(content), 1))]


def insert(content: bytes, _: Sequence[str], rng: random.Random) -> bytes:
    parts = [
        b"\x00",
        b"\x1b[2J",
        b"\xff\xfe",
        b"\xed\xa0\x80",
        b"\r",
        b"\xef\xbb\xbf",
        b"\xe2\x80\xae",
        b"\n" * 1000,
        b"[[a]]\n",
    ]
    at = rng.randrange(len(content) + 1)
    return content[:at] + rng.choice(parts) + content[at:]


MUTATIONS: tuple[Callable[[bytes, Sequence[str], random.Random], bytes], ...] = (
    flip_byte, change_lines, change_lines, change_value, change_value, change_value, change_value, change_key, cut,
    insert,
)  # fmt: skip


def is_small(file: Path, changes: Sequence[str] = ()) -> bool:
    """Return whether a recipe is valid and trains within a moment in this process."""
    try:
        recipe = plateaux.Recipe.load(file, changes)
        data, model = recipe.data.options, recipe.model.options
        sizes = [data.get("samples", 60), data.get("test_samples", 20), *model.get("hidden_sizes", [4])]
        return (
            recipe.data.name in ("moons", "spirals")
            and recipe.model.name == "mlp"
            and max([size for size in sizes if isinstance(size, int | float)], default=0) <= 2000
            and recipe.members <= 3
            and recipe.train.epochs <= 2
            and recipe.executor.name == "local"
            and recipe.executor.processes == 1
            and recipe.data.num_workers == 0
            and recipe.probe.samples <= 1000
            and not recipe.train.compile
            and not recipe.model.cache_features
            and not recipe.run.feature_cache
        )
    except (PlateauxError, TypeError):
        return False


def test_mutated_recipes_cause_no_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rng = random.Random(1)
    seeds = [SMALL, SHARPBALANCE, SEARCH, *(file.read_text("utf-8") for file in sorted(ROOT.glob("recipes/*.toml")))]
    file, problems = tmp_path / "recipe.toml", []
    for number in range(FILES // 3):
        content = mutate(rng.choice(seeds[:3] if rng.random() < 0.8 else seeds), seeds, rng)
        file.write_bytes(content)
        code, _, problem = attack(["recipe", "check", str(file)])
        if code == 0 and not problem and is_small(file):
            _, _, problem = attack(["train", str(file), "--out", f"run{number}", "--no-evaluate"])
        problems += [(content, problem)] if problem else []
    assert problems == []


def test_mutated_studies_cause_no_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rng = random.Random(2)
    file, problems = tmp_path / "study.toml", []
    for _ in range(FILES // 3):
        content = mutate(STUDY, [STUDY, SMALL], rng)
        file.write_bytes(content)
        _, _, problem = attack(["study", str(file), "--out", "study", "--dry-run"])
        problems += [(content, problem)] if problem else []
    assert problems == []


def mutate_json(content: bytes, rng: random.Random) -> bytes:
    text = content.decode()
    hostile = ["null", "true", "-1", "1e999", "NaN", "9" * 5000, '"x"', "[]", "{}", "[" * 100_000, '"\\u001b[2J"', ""]
    parts = text.split(":")
    at = rng.randrange(len(parts))
    if rng.random() < 0.7 and len(parts) > 1:
        end = parts[at].find(",")
        parts[at] = rng.choice(hostile) + (parts[at][end:] if end >= 0 else "")
        return ":".join(parts).encode()
    return flip_byte(content, [], rng) if rng.random() < 0.5 else cut(content, [], rng)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.toml").write_text(SMALL)
    (tmp_path / "study.toml").write_text(STUDY)
    (tmp_path / "latin1.toml").write_bytes(b"name = '\xfc'")
    (tmp_path / "list.json").write_text(json.dumps([1, 2]))
    (tmp_path / "folder").mkdir()
    plateaux.calibrate(plateaux.train(plateaux.Recipe.parse(SMALL), tmp_path / "run"))
    return tmp_path / "run"


COMMANDS = (
    "train", "plan", "status", "evaluate", "calibrate", "predict", "soup", "select", "landscape", "study", "report",
    "claims", "import-weights", "list", "recipe check", "recipe schema", "theory", "verify", "nope", "",
)  # fmt: skip
OPTIONS = (
    "--out", "-o", "--set", "--split", "--metrics", "--ood", "--members", "--limit", "--baseline", "--cache-logits",
    "--device", "--alpha", "--fraction", "--conformal", "--target-risk", "--bound", "--order", "--ood-score",
    "--strategy", "--max-barrier", "--size", "--metric", "--unique", "--eval-split", "--probes", "--plots",
    "--batchnorm", "--format", "--figures-dir", "--only-figures", "--max-runs", "--filter", "--results-only",
    "--dry-run", "--trust", "--json", "--markdown", "--ensemble-sizes", "--calibrated", "--exclude-calibration-ids",
    "--mode", "--min-members", "--branch-from", "--model", "--weights", "--data", "--evidence",
    "--quiet", "--nope", "--help", "--matrices", "--inits", "--devices",
)  # fmt: skip
WORDS = (
    "run", "small.toml", "study.toml", "latin1.toml", "list.json", "folder", "absent", "/dev/null", "/dev/null/x",
    "quickstart", "methods", "data", "models", "recipes", "x.csv", "x.md", "x.json", "x.html", "x.npz", "x.jsonl",
    "test", "train", "validation", "corrupted", "corrupted:fog:9", "test@3", "test@-1", "test@x", "all", "none",
    "accuracy", "ece(bins=0)", "ece(bins=x)", "ece(", "average_l2", "average_l2(radius=nan)", "slices", "plane",
    "cpu", "0", "0,7", "-1", "1e9", "nan", "0.5", str(10**30), "", " ", "\x00", "\x1b[2J", "[red]x[/]", "é", "\udcff",
    "x" * 10_000, "../x", "near", "near=", "=x", "near=moons,digits", "mlp", "moons", "optimizer.lr=-1",
    "optimizer.lr=x", "train.epochs=x", "members=0", "x", "a.b.c=1", "=", "data.samples=-5", "data.name=nope",
    "model.hidden_sizes=[]", "members=[1", "method.rho=nan", "optimizer.name='Nope'",
    "run/members/0/weights-1.safetensors", "os", "os.path", "aps", "lac", "hoeffding", "greedy", "float16", "off",
    "loop", "vmap", "offload", "1", "2",
)  # fmt: skip


def command_line(rng: random.Random) -> list[str]:
    """Return a random command line; half of them start with a plausible argument."""
    words = rng.choice(COMMANDS).split()
    plausible = {"train": "small.toml", "check": "small.toml", "study": "study.toml", "list": "methods"}
    if words and rng.random() < 0.7:
        words.append(plausible.get(words[-1], "run"))
    for _ in range(rng.randint(0, 4)):
        words += rng.choice([[rng.choice(OPTIONS), rng.choice(WORDS)], [rng.choice(OPTIONS)], [rng.choice(WORDS)]])
    return words


def is_quick(words: Sequence[str]) -> bool:
    """Return whether a command neither trains for long nor simulates the theory."""
    changes = [new for option, new in pairwise(words) if option == "--set"]
    recipes = [word for word in words[1:] if word in ("small.toml", "quickstart")]
    trains = words[:1] == ["train"] and recipes
    if words[:1] == ["study"]:
        return "--dry-run" in words or "--results-only" in words
    return words[:1] not in (["theory"],) and (
        not trains or (recipes[0] == "small.toml" and is_small(Path(recipes[0]), changes))
    )


def test_random_command_lines_cause_no_traceback(run: Path) -> None:
    rng = random.Random(4)
    lines = [words for words in (command_line(rng) for _ in range(3 * COMMAND_LINES)) if is_quick(words)]
    problems = [(words, problem) for words in lines[:COMMAND_LINES] if (problem := attack(words)[2])]
    assert len(lines) >= COMMAND_LINES
    assert problems == []
