"""The command line in a terminal and in a pipe."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import safetensors.torch
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

import plateaux
from plateaux.cli import main, progress
from plateaux.cli.groups import GROUPS
from plateaux.cli.main import KINDS, app
from plateaux.config import builtin_recipes
from plateaux.config.builtin_recipes import recipe_file
from plateaux.config.experiment import Experiment
from plateaux.core import formatting
from plateaux.core.errors import RecipeError
from plateaux.core.progress import MemberUpdate, Message
from plateaux.core.types import Estimate
from plateaux.evaluation import tables
from plateaux.evaluation.results import MetricResult
from plateaux.studies.builtin_studies import builtin_studies

SMALL = ["--set", "train.epochs=2", "--set", "members=2", "--set", "data.batch_size=128"]


def call(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(words))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    code, _, _ = call("train", "quickstart", *SMALL, "--out", str(tmp_path / "run"))
    assert code == 0
    return tmp_path / "run"


def test_status_is_a_table_also_in_a_pipe(trained: Path) -> None:
    code, out, message = call("status", str(trained))
    assert code == 0, message
    assert "epoch 2, the last" in out


def test_train_prints_json_if_asked_and_progress_to_stderr(tmp_path: Path) -> None:
    code, out, news = call("train", "quickstart", *SMALL, "--out", str(tmp_path / "run"), "--json")
    rows = json.loads(out)["metrics"][0]["rows"]
    assert code == 0
    assert "member 1: epoch 2/2" in news
    assert set(rows) == {
        "member 0", "member 1", "mean of members", "ensemble (mean probability)", "ensemble (mean logit)",
    }  # fmt: skip


def test_repeating_the_command_trains_nothing(trained: Path) -> None:
    before = {p: p.stat().st_mtime_ns for p in trained.rglob("weights-*.safetensors")}
    code, _, news = call("train", "quickstart", *SMALL, "--out", str(trained))
    assert (code, news.splitlines()[0]) == (0, "test: using cached float32 logits of 599 samples")
    assert before == {p: p.stat().st_mtime_ns for p in trained.rglob("weights-*.safetensors")}


def test_a_folder_of_another_recipe_is_refused_with_the_difference(trained: Path) -> None:
    code, _, message = call("train", "quickstart", *SMALL, "--set", "optimizer.lr=0.3", "--out", str(trained))
    assert code == 4
    assert "optimizer.lr: 0.1 -> 0.3" in message


def test_plan_and_status_of_a_finished_run_show_no_pending_jobs(trained: Path) -> None:
    assert json.loads(call("plan", str(trained), "--json")[1]) == []
    shown = json.loads(call("status", str(trained), "--json")[1])
    assert [each["state"] for each in shown["members"]] == ["finished"] * 2
    assert shown["bytes"] >= sum(each["bytes"] for each in shown["members"]) > 0


def test_plan_shows_the_jobs_of_a_run_with_more_members(trained: Path) -> None:
    run = plateaux.Run.open(trained)
    plateaux.Run.begin(trained, Experiment(run.recipe.replaced(members=3)), run.info)
    assert json.loads(call("plan", str(trained), "--json")[1]) == [
        {"kind": "train", "members": [2], "start": [0, 0], "stop": 2}
    ]


def test_evaluate_gives_the_metrics_of_train(trained: Path) -> None:
    found = json.loads(call("evaluate", str(trained), "--metrics", "accuracy,ece", "--json")[1])
    assert [each["metric"] for each in found] == ["accuracy", "ece"]
    assert found[0]["weights"]["member 0"] == "epoch 2, the last"
    again = {each.metric: each for each in plateaux.evaluate(trained, metrics=["accuracy"])}
    assert again["accuracy"].rows["member 1"].value == found[0]["rows"]["member 1"]["value"]


def test_evaluate_prints_markdown(trained: Path) -> None:
    text = call("evaluate", str(trained), "--markdown")[1]
    assert "| ensemble (mean probability) |" in text
    assert "digits, test samples (599)" in text


def test_evaluate_on_a_missing_split_is_an_error(trained: Path) -> None:
    code, _, message = call("evaluate", str(trained), "--split", "validation")
    assert code == 4
    assert "no validation samples" in message


def test_list_describes_every_plug_in_in_one_sentence() -> None:
    for kind in KINDS:
        found = json.loads(call("list", kind, "--json")[1])
        assert found
        assert all(words.endswith(".") for words in found.values()), (kind, found)


def test_studies_are_listed_by_name() -> None:
    code, out, _ = call("list", "studies", "--json")
    assert (code, json.loads(out)) == (0, {name: main._first_line(file) for name, file in builtin_studies().items()})
    assert call("list", "studies")[0] == 0


def test_the_help_lists_commands_by_purpose_and_training_first() -> None:
    lines = call("--help")[1].splitlines()
    first = [line.split()[0] for line in lines if line.startswith("  ") and line[2:3].isalpha()]
    assert [lines[n + 1].split()[0] for n, line in enumerate(lines) if line in ("Train:", "Evaluate:", "Use:")] == [
        "train",
        "evaluate",
        "predict",
    ]
    assert set(first) >= {name for names in GROUPS.values() for name in names}
    assert {name for names in GROUPS.values() for name in names} <= set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("option", "words"), [("--lr", "--set optimizer.lr=VALUE"), ("--batch-size", "--set data.batch_size=VALUE")]
)
def test_an_option_that_is_a_key_of_the_recipe_is_answered_with_set(option: str, words: str) -> None:
    code, _, message = call("train", "quickstart", option, "0.1")
    assert (code, words in " ".join(message.split())) == (2, True)
    assert "--set" not in call("calibrate", "run", option, "0.1")[2]


def test_list_of_an_unknown_kind_suggests_the_closest_name() -> None:
    code, _, message = call("list", "method")
    assert code == 2
    assert "methods" in message


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("method.roh=0.1", "did you mean 'rho'"),
        ("data.bacth_size=3", "did you mean 'batch_size'"),
        ("model.name=resnet9", "resnet8"),
        ("optimizer.name=SDG", "SGD"),
        ("train.epochs=0", "greater than or equal to 1"),
        ("loss.name=mse", "regression"),
        ("lr_scheduler=[{name='cosin'}]", "cosine"),
    ],
)
def test_the_error_for_an_invalid_recipe_suggests_a_valid_value(change: str, words: str) -> None:
    code, _, message = call("recipe", "check", "quickstart", "--set", change)
    assert code == 2
    assert words in message


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("optimizer.lr=-1", "--set 'optimizer.lr=-1': [optimizer] lr = -1: Input should be greater than or equal to 0"),
        ("optimizer.momentum=x", "--set 'optimizer.momentum=x': [optimizer] momentum = 'x': must be a number"),
        ("lr_scheduler=[{name='multistep'}]", "[lr_scheduler] 'multistep' needs 'milestones'"),
        ("lr_scheduler=[{name='multistep', milestones='x'}]", "milestones = 'x': must be an increasing list of epochs"),
        ("members=2147483648", "--set 'members=2147483648': members = 2147483648: Input should be less than or equal"),
        ("method.rho=-1", "--set 'method.rho=-1': [method] rho = -1: Input should be greater than or equal to 0"),
        ("model.widht=3", "--set 'model.widht=3': [model] has no key 'widht'"),
    ],
)
def test_a_mistake_in_set_is_reported_with_that_change_and_without_a_traceback(change: str, words: str) -> None:
    for command in (("recipe", "check"), ("train",)):
        code, _, message = call(*command, "quickstart", "--set", "method.name=sam", "--set", change)
        assert code == 2
        assert words in message
        assert ".toml" not in message


def test_the_error_for_an_unknown_key_in_a_file_states_its_line(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("[data]\nname = 'digits'\n[model]\nname = 'mlp'\n[method]\nname = 'sam'\nroh = 0.1\n")
    code, _, message = call("recipe", "check", str(file))
    assert code == 2
    assert "mine.toml, line 7" in message


def test_recipe_check_prints_a_valid_recipe() -> None:
    code, out, _ = call("recipe", "check", "quickstart", "--json")
    assert code == 0
    assert json.loads(out)["method"] == {"name": "sam", "rho": 0.05}


def test_schema_describes_every_section() -> None:
    assert set(json.loads(call("recipe", "schema")[1])["properties"]) == set(plateaux.Recipe.model_fields)


def test_missing_data_give_exit_code_3_and_the_download_url(tmp_path: Path) -> None:
    code, _, message = call("train", "cifar10_small", "--set", f"data.root={tmp_path}", "--out", str(tmp_path / "run"))
    assert code == 3
    assert "cs.toronto.edu" in message
    assert not (tmp_path / "run").exists()


def test_untrusted_code_is_not_called(tmp_path: Path) -> None:
    code, _, message = call("train", "quickstart", "--set", "model.name=os:system", "--out", str(tmp_path / "run"))
    assert code == 6
    assert "--trust os" in message


def test_import_weights_creates_a_run(tmp_path: Path) -> None:
    from plateaux.models.architectures.small import mlp

    nets = [mlp(shape=(1, 8, 8), classes=10) for _ in range(2)]
    safetensors.torch.save_file({f"net.{k}": v for k, v in nets[0].state_dict().items()}, tmp_path / "a.safetensors")
    torch.save(nets[1].state_dict(), tmp_path / "b.pt")
    files = [f"{tmp_path}/a.safetensors:net", f"{tmp_path}/b.pt"]
    words = ["import-weights", "-o", str(tmp_path / "run"), "--model", "mlp", "--data", "digits"]
    code, _, message = call(*words, "--weights", files[0], "--weights", files[1])
    assert code == 0, message
    ensemble = plateaux.load_predictor(tmp_path / "run").ensemble
    x = torch.rand(3, 1, 8, 8)
    seen = (x - ensemble.mean[0]) / ensemble.std[0]
    torch.testing.assert_close(ensemble.logits(x), torch.stack([net.eval()(seen) for net in nets]).detach())
    found = json.loads(call("evaluate", str(tmp_path / "run"), "--json")[1])
    assert found[0]["weights"]["member 0"].startswith("imported from")


def test_importing_mismatched_weights_reports_the_difference(tmp_path: Path) -> None:
    safetensors.torch.save_file({"layer.weight": torch.zeros(2)}, tmp_path / "a.safetensors")
    words = ["import-weights", "-o", str(tmp_path / "run"), "--model", "mlp", "--data", "digits"]
    code, _, message = call(*words, "--weights", f"{tmp_path}/a.safetensors")
    assert code == 2
    assert "layer.weight" in message
    assert not (tmp_path / "run").exists()


def test_the_command_starts_its_own_mesh(tmp_path: Path) -> None:
    words = ["train", "quickstart", *SMALL, "--executor", "mesh", "--processes", "2", "--set", "executor.threads=1"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "plateaux", *words, "--out", str(tmp_path / "mesh")],
        env=env, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    call("train", "quickstart", *SMALL, "--set", "executor.threads=1", "--out", str(tmp_path / "local"))
    for number in range(2):
        one, other = (plateaux.Run.open(tmp_path / name).weights(number) for name in ("mesh", "local"))
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_help_of_every_command_shows_the_equivalent_python() -> None:
    for name in ("train", "plan", "status", "evaluate", "calibrate", "predict", "import-weights", "list"):
        assert "In Python" in call(name, "--help")[1]


def test_a_table_shows_values_with_standard_errors() -> None:
    rows = {"member 0": Estimate(0.5, 0.01), "ensemble (mean logit)": Estimate(0.75)}
    found = [MetricResult("accuracy", "test", rows, True, {}, {"name": "toy", "samples": 1000}, percent=True)]
    console = Console(width=80, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(*tables.tables(found))
    text = console.export_text()
    assert "50.00 ± 1.00" in text
    assert "75.00" in text


def test_live_lines_show_every_member() -> None:
    latest = {
        0: MemberUpdate(
            0,
            epoch=1,
            epochs=4,
            step=5,
            steps=10,
            metrics={"loss": 0.5},
            samples_per_second=1234.5,
            seconds_left=3700.0,
        ),
        1: MemberUpdate(1, epoch=4, epochs=4, metrics={"train loss": 0.25, "train accuracy": 0.9}),
    }
    console = Console(width=160, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(progress.member_table(latest))
    text = console.export_text()
    assert "epoch 2/4" in text
    assert "loss 0.5000" in text
    assert "1,234 images/s" in text or "1,235 images/s" in text
    assert "1 h 01 min left" in text
    assert "done" in text


def test_live_lines_fit_into_80_columns() -> None:
    metrics = {"loss": 0.1234, "accuracy": 0.9812, "validation accuracy": 0.9712}
    update = MemberUpdate(
        10, epoch=10, epochs=30, step=1, steps=9, metrics=metrics, samples_per_second=12345.0, seconds_left=3700.0
    )
    console = Console(width=80, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(progress.member_table({10: update}, width=console.width))
    (line,) = console.export_text().splitlines()
    for words in ("member 10", "epoch 11/30", "loss 0.1234", "validation 97.1 %", "1 h 01 min left"):
        assert words in line


def test_live_lines_show_the_newest_loss() -> None:
    console = Console(force_terminal=True, width=160, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    in_epoch = MemberUpdate(0, epoch=0, epochs=2, step=1, steps=2, metrics={"loss": 1.5, "accuracy": 0.2})
    after_it = MemberUpdate(0, epoch=2, epochs=2, metrics={"train loss": 0.25, "train accuracy": 0.9})
    console.print(progress.member_table({0: in_epoch.merge(after_it)}))
    console.print(progress.member_table({0: after_it.merge(in_epoch)}))
    after, during = console.export_text().splitlines()
    assert "loss 0.2500  train 90.0 %" in after
    assert "loss 1.5000  train 20.0 %" in during


def test_a_terminal_shows_messages_and_live_progress() -> None:
    console = Console(force_terminal=True, width=160, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    with progress.live_progress(console) as show:
        show(Message("autotuned: bf16"))
        show(MemberUpdate(0, epoch=0, epochs=2, step=1, steps=2, metrics={"loss": 1.5}, seconds_left=61.0))
    text = console.export_text()
    assert "autotuned: bf16" in text
    assert "member 0" in text
    assert "1 min 01 s left" in text


def test_sizes_are_formatted_with_decimal_units() -> None:
    assert [formatting.format_size(n) for n in (12, 1_500, 2.5e6, 3e9, 4e12)] == [
        "12 B",
        "1.5 kB",
        "2.5 MB",
        "3.0 GB",
        "4.0 TB",
    ]


def test_quiet_prints_only_warnings_and_verbose_also_debug_messages(tmp_path: Path) -> None:
    words = ("train", "quickstart", *SMALL, "--no-evaluate", "--out")
    code, _, quiet = call("-q", *words, str(tmp_path / "quiet"))
    assert (code, quiet) == (0, "")
    code, _, usual = call(*words, str(tmp_path / "usual"))
    assert code == 0
    assert usual
    assert "pending jobs" not in usual
    code, _, verbose = call("-v", *words, str(tmp_path / "verbose"))
    assert code == 0
    assert "pending jobs: train members 0, 1" in verbose


@pytest.mark.parametrize("no_color", [False, True])
def test_no_color_turns_colors_off(no_color: bool) -> None:
    environment = {**os.environ, "FORCE_COLOR": "1", **({"NO_COLOR": "1"} if no_color else {})}
    command = [sys.executable, "-m", "plateaux", "recipe", "check", "no-such-recipe"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert ("\x1b[3" in done.stderr) is not no_color


def test_a_command_of_a_package_that_is_broken_or_has_a_taken_name_is_named_and_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    points = [
        EntryPoint(name, value, "plateaux.commands") for name, value in (("train", "json:loads"), ("x", "nope:f"))
    ]
    monkeypatch.setattr(main, "entry_points", lambda group: points)
    before = list(main.app.registered_commands)
    main._add_commands_of_packages()
    assert main.app.registered_commands == before
    words = " ".join(capsys.readouterr().err.split())
    assert "'train' of the package unknown is left out, because plateaux has a command of that name" in words
    assert "'x' of the package unknown could not be loaded: ModuleNotFoundError" in words


def test_a_package_cannot_replace_a_recipe_and_a_broken_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = recipe_file("quickstart")
    for name in ("quickstart", "another"):
        (tmp_path / f"{name}.toml").write_text("members = 1\n")
    point = EntryPoint("recipes", "somewhere:FOLDERS", "plateaux.files")
    monkeypatch.setattr(builtin_recipes, "entry_points", lambda group, name: [point])
    with pytest.raises(RecipeError, match="Cannot load the recipes of somewhere:FOLDERS: ModuleNotFoundError"):
        recipe_file("quickstart")
    monkeypatch.setattr(EntryPoint, "load", lambda self: [tmp_path])
    assert recipe_file("quickstart") == own
    assert recipe_file("another") == tmp_path / "another.toml"
