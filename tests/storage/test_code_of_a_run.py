"""A run is bound to the code and the data that it was trained with: every use compares them."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from cases import weights_path

import plateaux
from plateaux.config.builders.model import build_members
from plateaux.config.code import code_hashes, source_hash
from plateaux.config.components import NO_COMPONENTS, Components
from plateaux.core.errors import PlateauxError, RunError
from plateaux.optim.losses import CrossEntropy
from plateaux.studies.packed_results import encode_results
from plateaux.studies.result_rows import results_from_run, results_from_study
from plateaux.studies.runner import StudyRunner
from plateaux.studies.study import Study

HELPERS = "def width():\n    return 8  # units\n"
METHODS = '''
import plateaux
from plateaux.core.method import Method, Objective


@plateaux.method
def plain(loss, *, scale: float = 1.0):
    """A scaled loss."""

    def scaled(outputs, batch):
        return loss(outputs, batch) * scale

    return Method(Objective(scaled))
'''
NETS = """
from torch import nn

import own_helpers
from plateaux.optim.losses import CrossEntropy

class Scale(nn.Module):
    def forward(self, x):
        return 2 * x


LAYERS = {"scale": Scale}


def net():
    return nn.Sequential(nn.Linear(4, own_helpers.width()), nn.ReLU(), LAYERS["scale"](), nn.Linear(8, 3))


def tanh_net():
    return nn.Sequential(nn.Linear(4, own_helpers.width()), nn.Tanh(), LAYERS["scale"](), nn.Linear(8, 3))


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def doubled_loss(outputs, batch):
    return 2 * CrossEntropy()(outputs, batch)
"""
FILES = {"own_helpers": HELPERS, "own_methods": METHODS, "own_nets": NETS}
RECIPE = {
    "members": 2,
    "method": {"name": "own_methods:plain"},
    "data": {"name": "own", "batch_size": 20},
    "model": {"name": "own"},
    "train": {"epochs": 1},
}


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ModuleType]]:
    """Return a function that writes the user's files, imports them again, and returns the module of the networks."""
    monkeypatch.syspath_prepend(str(tmp_path / "code"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # files change within one second
    (tmp_path / "code").mkdir()

    def write_files(**changes: str) -> ModuleType:
        for name, text in {**FILES, **changes}.items():
            (tmp_path / "code" / f"{name}.py").write_text(text)
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        return importlib.import_module("own_nets")

    yield write_files
    for name in (*FILES, "own_measures"):
        sys.modules.pop(name, None)


def samples(shift: float = 0.0) -> Any:
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0)) + shift
    return plateaux.from_tensors((x, x.argmax(1) % 3), (x[:20], x[:20].argmax(1) % 3), classes=3)


@pytest.fixture
def path(tmp_path: Path, write: Callable[..., ModuleType]) -> Path:
    net = write().net
    recipe = plateaux.Recipe.from_dict(RECIPE)
    plateaux.train(recipe, tmp_path / "run", data=samples(), model=net, trust=["own_methods"])
    return tmp_path / "run"


def opened(path: Path, nets: ModuleType, **changes: Any) -> plateaux.Run:
    return plateaux.open_run(path, **{"data": samples(), "model": nets.net, "trust": ["own_methods"], **changes})


USES: dict[str, Callable[[plateaux.Run], object]] = {
    "evaluate": lambda run: plateaux.evaluate(run, metrics="nll"),
    "calibrate": lambda run: plateaux.calibrate(run, split="test"),
    "load_predictor": plateaux.load_predictor,
    "predict": lambda run: plateaux.predict(run, split="test"),
    "probe_landscape": lambda run: plateaux.probe_landscape(run, probes=["fisher_rao"]),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(
    ("changes", "section"),
    [
        ({"own_helpers": HELPERS.replace("8", "4 + 4")}, "model"),
        ({"own_methods": METHODS.replace("* scale", "+ scale")}, "method"),
        ({"own_nets": NETS.replace("2 * x", "3 * x")}, "layer own_nets.Scale"),
    ],
    ids=["helper", "method", "layer"],
)
def test_changed_code_is_refused_by_every_use(
    path: Path, write: Callable[..., ModuleType], use: str, changes: dict[str, str], section: str
) -> None:
    USES[use](opened(path, write()))
    with pytest.raises(RunError, match=rf"The code of the .*{section}.* is not that of the training"):
        USES[use](opened(path, write(**changes)))


@pytest.mark.parametrize("use", USES)
def test_another_model_with_equal_shapes_is_refused(path: Path, write: Callable[..., ModuleType], use: str) -> None:
    nets = write()
    with pytest.raises(RunError, match="The code of the model is not that of the training"):
        USES[use](opened(path, nets, model=nets.tanh_net))


def train_linear(out: Path, **passed: Any) -> plateaux.Run:
    """Train a model that is called as `torch.nn.Linear`, and has its parameters."""
    model = {"name": "own", "in_features": 4, "out_features": 3}
    recipe = plateaux.Recipe.from_dict({**RECIPE, "model": model, "method": {"name": "deep_ensemble"}})
    return plateaux.train(recipe, out, data=samples(), **passed)


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("trained", ["own", "library"])
def test_a_library_class_and_an_own_class_are_different_models(
    tmp_path: Path, write: Callable[..., ModuleType], use: str, trained: str
) -> None:
    own, library = write().Doubled, torch.nn.Linear
    model, other = (own, library) if trained == "own" else (library, own)
    train_linear(tmp_path, model=model)
    USES[use](plateaux.open_run(tmp_path, data=samples(), model=model))
    with pytest.raises(RunError, match="The code of the model is not that of the training"):
        USES[use](plateaux.open_run(tmp_path, data=samples(), model=other))
    with pytest.raises(RunError, match=r"code of model: .*torch\.nn\.modules\.linear\.Linear"):
        train_linear(tmp_path, model=other)


def test_a_model_that_is_passed_to_a_run_whose_recipe_names_one_is_refused(tmp_path: Path) -> None:
    recipe = plateaux.Recipe.from_dict(
        {"members": 1, "data": {"name": "blobs"}, "model": {"name": "mlp"}, "train": {"epochs": 1}}
    )
    run = plateaux.train(recipe, tmp_path / "run")

    def other() -> torch.nn.Module:
        return build_members(recipe, run.experiment.data, [0])[0]

    with pytest.raises(RunError, match="names its model, 'mlp'; open the run without model="):
        plateaux.evaluate(plateaux.open_run(tmp_path / "run", model=other))
    with pytest.raises(PlateauxError, match="model: named by the recipe -> "):
        plateaux.train(recipe, tmp_path / "run", model=other)


def test_a_library_loss_and_an_own_loss_are_different_losses(tmp_path: Path, write: Callable[..., ModuleType]) -> None:
    own, library = write().doubled_loss, CrossEntropy()
    for folder, loss, other in ((tmp_path / "own", own, library), (tmp_path / "library", library, own)):
        train_linear(folder, model=torch.nn.Linear, loss=loss)
        with pytest.raises(RunError, match=r"code of loss: .*plateaux\.optim\.losses\.CrossEntropy"):
            train_linear(folder, model=torch.nn.Linear, loss=other)


def test_a_run_without_a_record_of_its_library_model_is_not_refused(
    tmp_path: Path, write: Callable[..., ModuleType]
) -> None:
    run = train_linear(tmp_path, model=torch.nn.Linear)
    assert run.info.code == {"model": "torch.nn.modules.linear.Linear"}
    run.update_info({"code": {}})
    for model in (torch.nn.Linear, write().Doubled):
        assert plateaux.load_predictor(plateaux.open_run(tmp_path, data=samples(), model=model))


@pytest.mark.parametrize("name", ["mlp", "timm:resnet18", "hf:user/name"])
def test_a_model_of_a_library_that_the_recipe_names_has_no_record(name: str) -> None:
    recipe = plateaux.Recipe.from_dict({"model": {"name": name}, "data": {"name": "hf:user/data"}})
    assert code_hashes(recipe, NO_COMPONENTS) == {}


@pytest.mark.parametrize("use", ["evaluate", "calibrate", "predict", "probe_landscape"])
def test_other_data_of_equal_shape_are_refused(path: Path, write: Callable[..., ModuleType], use: str) -> None:
    with pytest.raises(RunError, match="samples have changed since this run was trained"):
        USES[use](opened(path, write(), data=samples(shift=1.0)))


def test_comments_and_unrelated_functions_are_no_change(path: Path, write: Callable[..., ModuleType]) -> None:
    changed = {name: "# a comment\n" + text + "\n\ndef unrelated():\n    return 1\n" for name, text in FILES.items()}
    assert plateaux.evaluate(opened(path, write(**changed)), metrics="nll")


def test_a_run_that_was_just_trained_knows_its_parts(tmp_path: Path, write: Callable[..., ModuleType]) -> None:
    net, recipe = write().net, plateaux.Recipe.from_dict(RECIPE)
    run = plateaux.train(recipe, tmp_path / "run", data=samples(), model=net, trust=["own_methods"])
    for use in USES.values():
        use(run)


def test_an_accepted_change_is_recorded_and_then_compared(path: Path, write: Callable[..., ModuleType]) -> None:
    changes = {"own_helpers": HELPERS.replace("8", "4 + 4"), "own_nets": NETS.replace("2 * x", "3 * x")}
    plateaux.evaluate(opened(path, write(**changes), accept_changes=True), metrics="nll")
    (accepted,) = json.loads((path / "run.json").read_text())["accepted_changes"]
    assert [line.partition(":")[0] for line in accepted] == ["code of layer own_nets.Scale", "code of model"]
    plateaux.evaluate(opened(path, write(**changes)), metrics="nll")
    with pytest.raises(RunError, match=r"The code of the model and the layer own_nets\.Scale|The code of the model"):
        plateaux.load_predictor(opened(path, write()))


@pytest.mark.parametrize("kind", ["soup", "imported"])
def test_a_run_that_was_not_trained_is_bound_to_its_code(
    path: Path, tmp_path: Path, write: Callable[..., ModuleType], kind: str
) -> None:
    run, out = opened(path, write()), tmp_path / "made"
    if kind == "soup":
        plateaux.soup(run, out, split="test", max_barrier=1e9)
    else:
        files = [weights_path(str(run), number) for number in range(2)]
        given = {"data": samples(), "model": write().net, "trust": ["own_methods"]}
        plateaux.import_weights(out, plateaux.Recipe.from_dict(RECIPE), files, **given)
    plateaux.evaluate(opened(out, write()), metrics="nll")
    for changes in ({"own_helpers": HELPERS.replace("8", "4 + 4")}, {"own_nets": NETS.replace("2 * x", "3 * x")}):
        with pytest.raises(RunError, match="The code of the"):
            plateaux.evaluate(opened(out, write(**changes)), metrics="nll")


def test_a_resume_with_a_changed_method_is_refused(path: Path, write: Callable[..., ModuleType]) -> None:
    recipe = plateaux.Recipe.from_dict({**RECIPE, "members": 3})
    nets = write(own_methods=METHODS.replace("* scale", "+ scale"))
    with pytest.raises(RunError, match="code of method: "):
        plateaux.train(recipe, path, data=samples(), model=nets.net, trust=["own_methods"])


@pytest.mark.process
def test_a_class_of_an_interactive_session_is_not_compared(tmp_path: Path) -> None:
    code = """
import sys, numpy, torch, plateaux
class Net(torch.nn.Sequential):
    def __init__(self):
        super().__init__(torch.nn.Linear(4, 3))
x = numpy.random.default_rng(0).normal(size=(90, 4)).astype("float32")
run = plateaux.fit(x, x.argmax(1) % 3, model=Net, out=sys.argv[1], members=2, epochs=1)
print(sorted(run.info.code), plateaux.evaluate(run)["accuracy"].ensemble.value >= 0)
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == ["[] True"], done.stderr[-2000:]


def test_a_hash_covers_constants_and_is_the_same_in_every_process(write: Callable[..., ModuleType]) -> None:
    first = source_hash(write().net)
    assert source_hash(write().net) == first
    assert source_hash(write(own_helpers=HELPERS.replace("8", "4 + 4")).net) != first
    assert source_hash(torch.nn.Linear) is None, "code of libraries does not count"


def test_equal_arguments_of_two_library_functions_have_different_hashes(write: Callable[..., ModuleType]) -> None:
    assert source_hash(partial(torch.nn.LeakyReLU, 0.1)) == source_hash(partial(torch.nn.LeakyReLU, 0.1))
    assert source_hash(partial(torch.nn.LeakyReLU, 0.1)) != source_hash(partial(torch.nn.ELU, 0.1))
    assert source_hash(partial(torch.Tensor.add, 1)) != source_hash(partial(torch.Tensor.sub, 1))
    text = "from functools import partial\n" + NETS.replace("nn.Tanh()", "ACT()") + "ACT = partial(nn.{}, 0.1)\n"
    first, second = (source_hash(write(own_nets=text.replace("{}", name)).tanh_net) for name in ("LeakyReLU", "ELU"))
    assert first != second


def test_a_counter_is_no_part_of_the_code(write: Callable[..., ModuleType]) -> None:
    counting = (
        NETS.replace("        return 2 * x", "        global calls\n        calls += 1\n        return 2 * x")
        + "calls = 0\n"
    )
    nets = write(own_nets=counting)
    before = source_hash(nets.Scale)
    nets.Scale()(1)
    assert nets.calls == 1
    assert source_hash(nets.Scale) == before


def test_other_data_than_those_in_the_run_folder_are_refused(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(90, 4)).astype(np.float32)
    run = plateaux.fit(x, x.argmax(1) % 3, model="mlp", out=tmp_path / "run", members=1, epochs=1)
    other = plateaux.from_arrays(x + 1, x.argmax(1) % 3)
    with pytest.raises(PlateauxError, match="have changed since this run was trained"):
        plateaux.evaluate(plateaux.open_run(run.store.root, data=other), metrics="nll")


# Metrics, probes, and studies.

MEASURES = '''
import plateaux
from plateaux.core.metric import Metric
from plateaux.core.types import Estimate
from plateaux.loss_landscape.probe import Probe


@plateaux.metric
def share(*, scale: float = 1.0):
    """A fixed number."""
    return Metric(lambda outputs, batch: {"n": batch.y.sum() * 0}, lambda sums: {"ensemble": Estimate(0.5 * scale)})


@plateaux.probe
def slope():
    """A fixed number."""
    return Probe(lambda surface: {"": Estimate(0.5)}, lambda samples: 1.0)
'''
CHANGED = MEASURES.replace("0.5", "0.25")
TRUST = ["own_methods", "own_measures"]
STUDY = {
    "base": {**RECIPE, "members": 1, "data": {"name": "blobs", "samples": 40}, "model": {"name": "mlp"}},
    "grid": {"method": {"low": {"method.scale": 1.0}, "high": {"method.scale": 2.0}}},
    "evaluate": {"metrics": ["own_measures:share"]},
    "landscape": {"probes": ["own_measures:slope"]},
}


@pytest.fixture
def study_runner(tmp_path: Path, write: Callable[..., ModuleType]) -> Callable[..., StudyRunner]:
    """Return a function that writes the user's files and opens the study again."""

    def runner(**changes: str) -> StudyRunner:
        write(**{"own_measures": MEASURES, **changes})
        components = Components(trust=tuple(TRUST))
        return StudyRunner(Study.from_dict(STUDY), tmp_path / "study", components=components)

    return runner


def stored_values(found: Any) -> set[float]:
    return {each.value for each in found if each.metric.startswith("own_measures:")}


@pytest.mark.parametrize("kind", ["metric", "probe"])
def test_a_result_of_another_version_of_a_metric_or_probe_is_left_out_and_then_replaced(
    path: Path, write: Callable[..., ModuleType], kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    def measure(nets: ModuleType) -> None:
        run = opened(path, nets, trust=TRUST)
        if kind == "metric":
            plateaux.evaluate(run, metrics="own_measures:share")
        else:
            plateaux.probe_landscape(run, probes=["own_measures:slope"], limit=10)

    measure(write(own_measures=MEASURES))
    assert stored_values(results_from_run(opened(path, write(own_measures=MEASURES), trust=TRUST))) == {0.5}
    nets = write(own_measures=CHANGED)
    assert stored_values(results_from_run(opened(path, nets, trust=TRUST))) == set()
    assert "is left out: its code has changed" in caplog.text
    measure(nets)
    assert stored_values(results_from_run(opened(path, nets, trust=TRUST))) == {0.25}


def test_a_study_whose_metric_or_probe_changed_is_not_done(study_runner: Callable[..., StudyRunner]) -> None:
    study_runner().run()
    assert study_runner().missing() == []
    again = study_runner(own_measures="# a comment\n" + MEASURES)
    assert again.missing() == []
    changed = study_runner(own_measures=CHANGED)
    assert sum(len(trials) for _, trials in changed.missing()) == 2
    changed.run()
    assert stored_values(results_from_study(changed.root)) == {0.25}


def test_a_study_whose_method_changed_is_not_done_and_does_not_mix_two_versions(
    study_runner: Callable[..., StudyRunner], caplog: pytest.LogCaptureFixture
) -> None:
    study_runner().run()
    changed = study_runner(own_methods=METHODS.replace("* scale", "+ scale"))
    todo = changed.missing()
    assert len(todo) == 2
    with pytest.raises(RunError, match=r"The code of the method of method=low #0 has changed .* delete .*runs/"):
        changed.run()
    shutil.rmtree(changed.root / "runs" / todo[0][0].folder)  # as the message advises
    with pytest.raises(RunError, match="of method=high #0 has changed"):
        changed.run()
    assert {each.condition["method"] for each in results_from_study(changed.root)} == {"low"}
    assert "method=high #0 is left out: it is of an earlier version" in caplog.text
    shutil.rmtree(changed.root / "runs" / todo[1][0].folder)
    changed.run()
    assert {each.condition["method"] for each in results_from_study(changed.root)} == {"low", "high"}


def test_results_of_a_study_without_hashes_of_code_stay_done(study_runner: Callable[..., StudyRunner]) -> None:
    runner = study_runner()
    runner.run()
    old = runner.results()
    for each in [*old["runs"].values(), *old["conditions"]]:
        del each["code"]
    runner.store.put("results.json", encode_results({key: old[key] for key in old if key != "format"}))
    assert study_runner().missing() == []
    assert results_from_study(runner.root)


def test_a_study_of_library_code_stores_no_hash_of_code(tmp_path: Path) -> None:
    tree = {**STUDY, "grid": {}, "evaluate": {"metrics": ["accuracy"]}, "landscape": {}}
    study = Study.from_dict({**tree, "base": {**STUDY["base"], "method": {"name": "deep_ensemble"}}})
    runner = StudyRunner(study, tmp_path)
    runner.run()
    assert runner.evaluation_hash == study.evaluation_hash()
    assert '"code"' not in (tmp_path / "results.json").read_text()


def test_a_metric_that_selects_the_weights_is_code_of_the_run(write: Callable[..., ModuleType]) -> None:
    recipe = plateaux.Recipe.from_dict({**RECIPE, "train": {"select": "best:own_measures:share"}})
    hashes = []
    for text in (MEASURES, CHANGED):
        write(own_measures=text)
        hashes.append(code_hashes(recipe, Components(trust=tuple(TRUST)))["metric"])
    assert hashes[0] != hashes[1]
