"""Run folders and reports are published: they contain neither the name of the machine nor its folders."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from cases import NO_DATA
from safetensors.torch import save_file

import plateaux
from plateaux.config.experiment import Experiment
from plateaux.config.recipe import Recipe
from plateaux.core.errors import StorageError
from plateaux.core.formatting import hide_folders
from plateaux.core.progress import Message
from plateaux.reports.export import to_csv, to_html, to_json, to_markdown
from plateaux.reports.report import report
from plateaux.storage.member_writer import write_member
from plateaux.training.job_records import load_records, record_job
from plateaux.training.jobs import Job

HOST, FOLDER = "private-host", "private-folder"
RECIPE = {
    "members": 2,
    "data": {"name": "digits", "limit": 40, "test_limit": 20, "batch_size": 20, "validation_split": 10},
    "model": {"name": "mlp", "hidden_sizes": [4]},
    "optimizer": {"name": "SGD", "lr": 0.1},
    "train": {"epochs": 1},
    "executor": {"threads": 1},
    "run": {"trackers": ["tensorboard"]},
}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("platform.node", lambda: HOST)
    monkeypatch.setattr("socket.gethostname", lambda: HOST)
    return tmp_path / FOLDER


def leaks(folder: Path) -> Iterator[str]:
    """Yield the files whose name or content contains the private names."""
    for path in folder.rglob("*"):
        name = str(path.relative_to(folder))
        text = name.encode() + (path.read_bytes() if path.is_file() else b"")
        if HOST.encode() in text or FOLDER.encode() in text:
            yield name


def test_a_run_folder_contains_neither_host_name_nor_machine_paths(root: Path) -> None:
    pytest.importorskip("tensorboard", reason='TensorBoard is not installed: pip install "plateaux[tensorboard]"')
    run = plateaux.train(Recipe.from_dict(RECIPE), root / "run")
    plateaux.evaluate(run)
    with suppress(StorageError), record_job(run, Job((0,), (0, 0), 1), lambda _: None, enabled=True) as recorder:
        recorder.progress(Message(f"written to {root}/run/metrics, {root}/run"))
        raise StorageError(f"{root}/run/members/0 is full")
    (record,) = load_records(run)
    assert "members/0 is full" in record.problem
    assert 'File "' in record.problem
    assert list((root / "run").rglob("events.out.tfevents.*"))
    assert list(leaks(root / "run")) == []


def test_imported_weights_and_soups_contain_no_paths(root: Path) -> None:
    run = plateaux.train(Recipe.from_dict({**RECIPE, "run": {}}), root / "run")
    save_file(run.weights(0), root / "first.safetensors")
    single = Recipe.from_dict({**RECIPE, "members": 1, "run": {}})
    made = plateaux.import_weights(root / "imported", single, [str(root / "first.safetensors")])
    assert made.progress(0).weights_source == "imported from first.safetensors"
    plateaux.soup(run, root / "soup", max_barrier=1e9)
    assert list(leaks(root / "imported")) == []
    assert list(leaks(root / "soup")) == []


def test_a_report_contains_neither_host_name_nor_machine_paths(root: Path) -> None:
    pytest.importorskip("matplotlib", reason='matplotlib is not installed: pip install "plateaux[report]"')
    for seed in (0, 1):
        run = plateaux.train(Recipe.from_dict({**RECIPE, "seed": seed, "run": {}}), root / f"run{seed}")
        plateaux.evaluate(run)
    one, two = report([root / "run0"]), report([root / "run0", root / "run1"], figures=False)
    pages = [to_html(one), to_markdown(one, None), to_json(one), to_csv(one), to_json(two), to_csv(two)]
    assert [HOST in page or FOLDER in page for page in pages] == [False] * 6
    assert "run0" in pages[3]
    assert {each.run for each in two.results} == {"run0", "run1"}


def test_a_report_shows_samples_only_on_request(root: Path) -> None:
    pytest.importorskip("matplotlib", reason='matplotlib is not installed: pip install "plateaux[report]"')
    run = plateaux.train(Recipe.from_dict({**RECIPE, "run": {}}), root / "run")
    plateaux.evaluate(run)
    names = {
        key: {name for name, _ in report([root / "run"], **options).figures()}  # type: ignore[arg-type]
        for key, options in {
            "default": {},
            "flag": {"sample_images": True},
            "named": {"only_figures": ["gallery"]},
        }.items()
    }
    assert "gallery" not in names["default"]
    assert names["flag"] == {*names["default"], "gallery"}
    assert names["named"] == {"gallery"}


def test_a_claim_names_its_process_without_the_name_of_the_machine(root: Path) -> None:
    run = plateaux.Run.begin(root, Experiment(Recipe.from_dict(RECIPE)), NO_DATA)
    with write_member(run, 0):
        assert run.progress(0).claim is not None
        assert HOST not in run.store.get("members/0/progress.json").decode()


def test_folders_of_this_machine_are_hidden(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    text = (
        f'File "{plateaux.__file__}", {tmp_path}/here/a.txt, {tmp_path}/here, {tmp_path}/run/x, {tmp_path}/run, /etc/x'
    )
    hidden = 'File "plateaux/__init__.py", a.txt, here, x, run, /etc/x'
    assert hide_folders(text, tmp_path / "run") == hidden
