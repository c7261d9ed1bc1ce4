"""Untrusted recipes, studies, and run folders under an audit hook, in a folder full of hostile modules."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from attacking import COUNTS, EXIT_CODES, IS_LONG
from cases import rewrite
from hf_folders import save_texts

import plateaux
from plateaux.config.experiment import Experiment

TESTS = Path(__file__).parents[1]
# Standard modules that a started process imports first, packages that commands import, and names in untrusted files.
HOSTILE_MODULES = (
    "torch", "json", "sitecustomize", "usercustomize", "toy_probes", "numpy", "plateaux", "multiprocessing", "pickle",
    "socket", "typing", "re", "matplotlib", "rich", "typer", "pydantic", "tomllib", "safetensors", "evil", "conftest",
    "runpy", "encodings", "jinja2", "PIL", "ray", "fsspec", "tensorboard", "random", "threading", "ctypes",
    "transformers", "datasets", "peft", "huggingface_hub", "tokenizers",
    "wandb", "mlflow", "queue", "signal", "tempfile", "select",
)  # fmt: skip
TIMM_CONFIG = {"model_type": "timm_wrapper", "architecture": "hf_hub:evil/model", "num_channels": 1, "image_size": 8}
RECIPE = """
members = 2
[data]
name = "moons"
samples = 60
test_samples = 30
validation_split = 0.3
[model]
name = "mlp"
hidden_sizes = [4]
[train]
epochs = 1
"""
STUDY = """
[base]
members = 1
data = {name = "moons", samples = 60, test_samples = 30}
model = {name = "mlp", hidden_sizes = [4]}
train = {epochs = 1}
[grid]
"optimizer.lr" = [0.1]
[evaluate]
metrics = ["accuracy"]
"""
# Changes of the recipe that name code, a module of the folder, an address, or a file of somebody else.
NAMES = (
    'data.name="evil:load"', 'model.name="evil:net"', 'model.name="torch:Tensor"', 'method.name="evil:method"',
    'loss.name="evil:loss"', 'executor.name="evil:executor"', 'probe.probes=["toy_probes:loss"]',
    'train.select="best:evil:metric"', 'optimizer.name="evil:SGD"', 'optimizer.name="__class__"',
    'lr_scheduler=[{name="evil:cosine"}]', 'lr_scheduler=[{name="os:system"}]', 'model.name="os:system"',
    'model.name="subprocess:call"', 'data.name="builtins:eval"', 'model.weights="weights.pkl"',
    'model.name="timm:evil"',
    'model.name="hf:evil/model"', 'model.name="hf:model-of-evil"', 'model.name="hf:model-of-evil@main"',
    'model.name="hf:http://127.0.0.1:9/model"', 'model.name=["hf:evil/a","hf:evil/b"]',
    'data.name="hf:evil/data"', 'data.name="hf:data-of-evil"', 'data.name="hf:https://127.0.0.1:9/data"',
    'data={name="hf:texts",vocabulary="hf:evil/tokenizer"}', 'data={name="hf:texts",vocabulary="evil/tokenizer"}',
    'data={name="hf:texts",vocabulary="model-of-evil"}', 'data={name="hf:texts",hub_access=true}',
    'model={name="hf:evil/model",download=true}', 'model={name="hf:evil/model",hub_access={download=true}}',
    'data.unlabeled="evil:load"', 'run.feature_cache="s3://evil/x"', 'data.root="http://evil"',
    'run.trackers=["evil:Tracker"]', 'run.trackers=["tensorboard", "evil:Tracker"]',
)  # fmt: skip
FETCHING = {  # models that name weights of a server; each recipe has data of their kind
    "hf": 'name = "hf:timm-of-evil"\npretrained = false',
    "timm": 'name = "timm:test_vit"\npretrained = true',
}
TRACKERS = ("wandb", "mlflow")  # connect to servers
REMOVED = ("COVERAGE_", "PYTHONSAFEPATH", "TORCHINDUCTOR_")  # set by the process of the tests
FOREIGN = (
    "evil:",
    "toy_probes:",
    "os:",
    "builtins:",
    "subprocess:",
    "torch:",
    "evil.toml",
    "evil-study",
    "ray.toml",
    "tracked-",
    "fetching-",
    "pkl",
    "ckpt",
    "hf-model",
    "hf:",
)


class Payload:
    """An object whose unpickling creates a file."""

    def __reduce__(self) -> Any:
        return (os.system, ("touch pickled",))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a current folder in which every import leaves a marker, with an untrusted recipe, study, and run."""
    here = tmp_path / "here"
    here.mkdir()
    marker = f"import os\nopen({str(tmp_path / 'marker')!r}, 'a').write(__name__ + chr(10))\n"
    code = marker + "def load(**_): open(__file__ + '.called', 'w')\nnet = method = loss = executor = metric = load\n"
    for name in HOSTILE_MODULES:
        (here / f"{name}.py").write_text(code)
    (here / "recipe.toml").write_text(RECIPE)
    (here / "study.toml").write_text(STUDY)
    (here / "evil.toml").write_text(RECIPE.replace('"mlp"\nhidden_sizes = [4]', '"evil:net"'))
    (here / "ray.toml").write_text(f'{RECIPE}[executor]\nname = "ray"\naddress = "10.0.0.1:6379"\n')
    for name, model in FETCHING.items():
        images = RECIPE.replace('"moons"\nsamples = 60\ntest_samples = 30', '"digits"')
        (here / f"fetching-{name}.toml").write_text(images.replace('name = "mlp"\nhidden_sizes = [4]', model))
    for name in TRACKERS:
        (here / f"tracked-{name}.toml").write_text(f'{RECIPE}[run]\ntrackers = ["tensorboard", "{name}"]\n')
    tracked = STUDY.replace("[grid]", 'run = {trackers = ["wandb"]}\n[grid]')
    (here / "tracked-study.toml").write_text(tracked)
    (here / "evil-study.toml").write_text(STUDY.replace('["accuracy"]', '["evil:metric"]'))
    _save_hugging_face(here, code)
    (here / "weights.pkl").write_bytes(b"cos\nsystem\n(S'touch pickled'\ntR.")
    for file in (here / "weights.ckpt", here / "hf-model" / "pytorch_model.bin"):
        file.parent.mkdir(exist_ok=True)
        torch.save({"state_dict": {"weight": torch.zeros(1)}, "hyper_parameters": {"callback": Payload()}}, file)
    (here / "hf-model" / "config.json").write_text('{"model_type": "bert", "auto_map": {"AutoConfig": "evil.load"}}')
    (here / "results.json").write_text('{"format": 2, "conditions": [], "runs": {}}')
    plateaux.calibrate(plateaux.train(plateaux.Recipe.parse(RECIPE), here / "run"))
    shutil.copytree(here / "run", here / "evil-run")
    hostile = Experiment(plateaux.Recipe.load(here / "evil.toml"))
    rewrite(replace(plateaux.Run.open(here / "evil-run"), experiment=hostile))  # with the digest of the hostile recipe
    shutil.copytree(here / "run", here / "fetching-run")
    original = plateaux.Run.open(here / "fetching-run")
    recipe = plateaux.Recipe.load(here / "fetching-hf.toml")
    info = replace(
        original.info,
        data=replace(original.info.data, shape=(1, 8, 8)),
        model_configs={recipe.model.name: TIMM_CONFIG},
    )
    rewrite(replace(original, experiment=Experiment(recipe), info=info))
    return here


def _save_hugging_face(here: Path, code: str) -> None:
    """Write a model, a tokenizer, and a data set that name code, pickled weights, other files, and a server."""
    model, data = here / "model-of-evil", here / "data-of-evil"
    for folder in (model, data):
        folder.mkdir()
        for name in ("modeling_evil", "configuration_evil", "tokenization_evil", "data-of-evil", "__init__"):
            (folder / f"{name}.py").write_text(code)
    names = {
        "AutoConfig": "configuration_evil.net", "AutoModelForSequenceClassification": "modeling_evil.net",
        "AutoTokenizer": ["tokenization_evil.net", "tokenization_evil.net"],
    }  # fmt: skip
    config = {"model_type": "evil", "auto_map": names, "attn_implementation": "evil/kernel"}
    (model / "config.json").write_text(json.dumps({**config, "_name_or_path": "evil/model"}))
    (model / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Evil", "auto_map": names}))
    (model / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch pickled'\ntR.")
    (data / "README.md").write_text("---\nconfigs:\n- data_files: http://127.0.0.1:9/x.csv\n---\n")
    (data / "state.json").write_text(json.dumps({"_data_files": [{"filename": "http://127.0.0.1:9/x.arrow"}]}))
    (data / "dataset_info.json").write_text("{}")
    (here / "timm-of-evil").mkdir()
    (here / "timm-of-evil" / "config.json").write_text(json.dumps(TIMM_CONFIG))
    if find_spec("datasets") is not None:
        save_texts(here / "texts", train=20, test=10)


def commands(out: Path) -> list[list[str]]:
    """Return command lines: every command on a harmless run, and on what names code of somebody else."""
    runs = [
        ["status", "{run}"], ["plan", "{run}"], ["train", "{run}", "--no-evaluate"],
        ["evaluate", "{run}", "--metrics", "accuracy,nll"],
        ["evaluate", "{run}", "--metrics", "evil:metric"], ["evaluate", "{run}", "--ood", "far=evil:load"],
        ["evaluate", "{run}", "--ood", "far=hf:evil/data"], ["evaluate", "{run}", "--split", "hf:evil/data"],
        ["evaluate", "{run}", "--calibrated", "--exclude-calibration-ids"],
        ["predict", "{run}", "--split", "test", "-o", f"{out}/p.csv"],
        ["calibrate", "{run}"], ["landscape", "{run}", "--probes", "average_l2(samples=8)"],
        ["landscape", "{run}", "--probes", "toy_probes:loss"], ["soup", "{run}", "-o", f"{out}/soup"],
        ["export", "{run}", "-o", f"{out}/bundle"],
        ["select", "{run}", "-o", f"{out}/select.json"], ["report", "{run}", "-o", f"{out}/r.html"],
    ]  # fmt: skip
    lines = [[word.format(run=run) for word in words] for words in runs for run in (f"{out}/run", f"{out}/evil-run")]
    lines += [["train", "recipe.toml", "--out", f"{out}/new"], ["train", "evil.toml", "--out", f"{out}/evil"]]
    for name in FETCHING:
        lines += [["train", f"fetching-{name}.toml", "--out", f"{out}/fetched"]]
        lines += [["recipe", "check", f"fetching-{name}.toml"]]
    lines += [["evaluate", f"{out}/fetching-run"], ["export", f"{out}/fetching-run", "-o", f"{out}/fetched"]]
    lines += [["train", "ray.toml", "--out", f"{out}/evil"], ["recipe", "check", "ray.toml"]]
    for name in TRACKERS:
        lines += [["train", f"tracked-{name}.toml", "--out", f"{out}/tracked"]]
        lines += [["recipe", "check", f"tracked-{name}.toml"]]
    lines += [["study", "tracked-study.toml", "--out", f"{out}/tracked-study"]]
    lines += [
        ["study", "study.toml", "--out", f"{out}/study"],
        ["study", "evil-study.toml", "--out", f"{out}/evil-study"],
    ]
    lines += [["report", "results.json", "-o", f"{out}/s.md"], ["claims", "-o", f"{out}/claims.md"], ["list", "probes"]]
    words = ["import-weights", "-o", f"{out}/i", "--model", "mlp", "--data", "moons", "--weights"]
    lines += [[*words, "weights.pkl"], [*words, "weights.ckpt"], [*words, "hf-model"], ["recipe", "schema"]]
    for number, change in enumerate(NAMES):
        lines.append(["recipe", "check", "recipe.toml", "--set", change])
        lines.append(["train", "recipe.toml", "--out", f"{out}/train{number}", "--no-evaluate", "--set", change])
    return lines


def snapshot(folder: Path, *, without: Path) -> dict[str, str]:
    """Return a hash of every file below a folder, except below `without`."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_relative_to(without))
    return {str(path): sha256(path.read_bytes()).hexdigest() for path in files}


def environment(tmp_path: Path) -> dict[str, str]:
    """Return an environment whose home and temporary folder are inside of the test's folder."""
    for name in ("home", "temporary"):
        (tmp_path / name).mkdir(exist_ok=True)
    env = {name: value for name, value in os.environ.items() if not name.startswith(REMOVED)}
    env |= {"HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path / "temporary"), "PYTHONDONTWRITEBYTECODE": "1"}
    path = os.pathsep.join([str(Path(plateaux.__file__).parents[1]), os.environ["PYTHONPATH"]])
    return env | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def test_untrusted_files_execute_and_touch_nothing(folder: Path, tmp_path: Path) -> None:
    out, env = tmp_path / "out", environment(tmp_path)
    out.mkdir()
    for name in ("run", "evil-run", "fetching-run"):
        shutil.move(folder / name, out / name)
    before, lines = snapshot(tmp_path, without=out), commands(out)
    allowed = [str(out), env["TMPDIR"], env["HOME"]]
    words = [str(TESTS / "auditing.py"), json.dumps(lines), json.dumps(allowed), str(out / "audit.json")]
    ended = subprocess.run([sys.executable, *words], cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    audit: dict[str, Any] = json.loads((out / "audit.json").read_text())
    changed = set(snapshot(tmp_path, without=out).items()) ^ set(before.items())
    touched = sorted({path for path, _ in changed if not path.startswith((env["TMPDIR"], env["HOME"]))})
    COUNTS["inputs"] += len(lines)
    COUNTS["tracebacks"] += sum(bool(error) for _, error, _ in audit["ended"])
    COUNTS["files touched outside"] += len({*touched, *audit["writes"]})
    COUNTS["code executed"] += len(audit["code"]) + (tmp_path / "marker").exists()
    results = [(words, *result) for words, result in zip(lines, audit["ended"], strict=True)]
    assert [result for result in results if result[1] not in EXIT_CODES or result[2]] == []
    lines_with_names = [each for each in results if any(name in " ".join(each[0]) for name in FOREIGN)]
    named = [each for each in lines_with_names if each[0][0] != "recipe" and "unlabeled" not in each[0][-1]]
    assert len(named) > len(NAMES)
    assert [result for result in named if result[1] == 0] == []
    assert not (tmp_path / "marker").exists()
    assert not list(tmp_path.rglob("pickled"))
    known = ("'fc-list'", "'/sbin/ldconfig', '-p'")  # matplotlib lists fonts; CUDA builds of torch look for libraries
    started = [each for each in audit["processes"] if not any(name in each for name in known)]
    found = [*audit["code"], *audit["writes"], *audit["network"], *started, *touched]
    assert found == []


STARTED = {
    "pool": ["train", "recipe.toml", "--processes", "2", "--no-evaluate"],
    "study on a mesh": ["study", "study.toml", "--executor", "mesh", "--processes", "1"],
    "workers": ["train", "recipe.toml", "--no-evaluate", "--set", "data.num_workers=1"],
    "mesh": ["train", "recipe.toml", "--executor", "mesh", "--processes", "2", "--no-evaluate"],
    "tracker": ["train", "recipe.toml", "--no-evaluate", "--set", "run.trackers=['tensorboard']"],
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "words", [*STARTED.values()] if IS_LONG else [STARTED[name] for name in ("pool", "study on a mesh", "tracker")]
)
def test_started_processes_run_no_code_of_the_current_folder(folder: Path, tmp_path: Path, words: list[str]) -> None:
    COUNTS["inputs"] += 1
    script = tmp_path / "plateaux"  # as pip installs it
    script.write_text("from plateaux.cli.main import main\nif __name__ == '__main__':\n    main()\n")
    command = [sys.executable, str(script), *words, "--out", str(tmp_path / "out")]
    env = environment(tmp_path)
    ended = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    executed = (tmp_path / "marker").read_text().split() if (tmp_path / "marker").exists() else []
    COUNTS["code executed"] += bool(executed)
    assert executed == []
    assert ended.returncode == 0, ended.stderr[-2000:]
