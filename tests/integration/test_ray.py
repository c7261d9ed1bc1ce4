"""A Ray cluster of three nodes on one machine: runs survive failures and end at the weights of `local`."""

from __future__ import annotations

import ctypes
import json
import os
import random
import resource
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
import rayable
import torch
from cases import distance, weights
from rayable import counted
from s3_server import Flaky, serving
from toy_jobs import ToyJob
from typer.testing import CliRunner
from waiting import wait_until

import plateaux
from plateaux.cli.main import app
from plateaux.config.components import Components
from plateaux.config.recipe import Recipe
from plateaux.core.errors import PlateauxError, RecipeError, RunError
from plateaux.core.progress import MemberUpdate, ProgressEvent, WorkDone
from plateaux.core.runtime import configure_runtime
from plateaux.distributed.executors.ray import RayExecutor
from plateaux.distributed.executors.ray import ray as on_ray
from plateaux.distributed.ray_worker import RayWorker
from plateaux.models.architectures.resnet import resnet
from plateaux.storage.run import Run
from plateaux.studies.result_rows import read_results
from plateaux.studies.runner import StudyRunner
from plateaux.studies.study import Study
from plateaux.training.job_records import JobRecord, load_records
from plateaux.training.loop import trainer

ray = pytest.importorskip("ray", reason='Ray is not installed: pip install "plateaux[ray]"')

from ray.cluster_utils import Cluster  # noqa: E402

from plateaux.distributed.ray_cluster import Resources, map_reduce, require_token_authentication  # noqa: E402
from plateaux.distributed.ray_pool import RayWorkerPool  # noqa: E402

HERE = Path(__file__).parents[1]  # the folder of the helpers
LONG = os.environ.get("PLATEAUX_LONG") == "1"
GIVEN = Components(trust=("rayable", "cases"))
STEPS = 5  # of an epoch: what may be lost by a kill
SMALL = {"object_store_memory": 80 << 20}
PLAIN = dict(rayable.SETTINGS)
trainer.step = rayable.plain_step  # tests of other files go on in this process
pytestmark = [pytest.mark.timeout(3400 if LONG else 600), pytest.mark.xdist_group("ray")]


@pytest.fixture(autouse=True)
def _steps_tell(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let steps of this process tell too, as those of the cluster do, until the test is over."""
    monkeypatch.setattr(trainer, "step", rayable.step)
    yield
    rayable.SETTINGS.update(PLAIN)


class Nodes:
    """A head that takes no jobs, and nodes with a place each that can be taken away and brought back."""

    def __init__(self, count: int, mark: str) -> None:
        self.mark = mark
        self.cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **SMALL}
        )
        self.address = self.cluster.address
        # Before there are others: a driver takes any node of its machine for its own, and that one must stay.
        ray.init(self.address, log_to_driver=False, configure_logging=False)
        self.nodes = [self._another() for _ in range(count)]
        self.cluster.wait_for_nodes()

    def lose(self, which: int) -> None:
        """Take a node away without grace, and bring another in its place."""
        self.cluster.remove_node(self.nodes.pop(which), allow_graceful=False)
        self.nodes.append(self._another())

    def _another(self) -> Any:
        """Add a node; where others use the machine, one may take longer to start than Ray waits."""
        for left in (2, 1, 0):
            before = set(processes(self.mark, b"raylet/raylet "))
            try:
                return self.cluster.add_node(num_cpus=1, wait=False, **SMALL)
            except Exception:
                for pid in set(processes(self.mark, b"raylet/raylet ")) - before:
                    os.kill(pid, signal.SIGKILL)
                if not left:
                    raise
        raise AssertionError


def processes(mark: str, call: bytes = b"") -> list[int]:
    """Return the processes that were started with a mark in their environment, by a call with these words."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
            if call in words and mark.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


def listening(pids: list[int]) -> list[str]:
    """Return the addresses on which these processes accept connections, as the kernel writes them."""
    addresses = {}
    for kind in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A":  # LISTEN
                addresses[f"socket:[{words[9]}]"] = words[1].partition(":")[0]
    sockets = set[str]()
    for pid in pids:
        with suppress(OSError):
            sockets |= {os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir()}
    return [addresses[each] for each in sockets & addresses.keys()]


def import_path() -> str:
    """Return a PYTHONPATH with this tree. It has no empty entry, because Python reads that as the current folder."""
    entries = (str(HERE.parent / "src"), str(HERE), os.environ.get("PYTHONPATH"))
    return os.pathsep.join(entry for entry in entries if entry)


@pytest.fixture(scope="module")
def server() -> Iterator[Flaky]:
    with serving() as made:
        yield made


@pytest.fixture(scope="module")
def nodes(server: Flaky) -> Iterator[Nodes]:
    mark = uuid4().hex
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", import_path())
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PLATEAUX_MARK", mark)
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", uuid4().hex)
        require_token_authentication()  # Ray was imported before the variables were set
        for name in ("COVERAGE_PROCESS_CONFIG", "COVERAGE_PROCESS_START"):  # Ray's own processes are many, and not ours
            patch.delenv(name, raising=False)
        for kind in (plateaux.method, plateaux.metric, plateaux.dataset, plateaux.executor, plateaux.model):
            kind.names()  # before there are threads, which must not look for plug-ins at the same time
        made = Nodes(2, mark)
        patch.setattr(sys.modules[__name__], "GIVEN", replace(GIVEN, trust=(*GIVEN.trust, made.address)))
        assert processes(mark)
        yield made
        ray.shutdown()
        made.cluster.shutdown()
    wait_until(lambda: not processes(mark), seconds=60)  # nothing is left behind


def recipe(folder: Path, method: Mapping[str, Any], *, members: int = 3, epochs: int = 2, **data: Any) -> Recipe:
    return Recipe.from_dict(
        {
            "members": members, "seed": 3,
            "data": {"name": "rayable:watched", "samples": 40, "batch_size": 8, "log": str(folder / "steps"), **data},
            "model": {"name": "mlp", "hidden_sizes": [6]},
            "method": dict(method),
            "optimizer": {"name": "SGD", "lr": 0.1, "momentum": 0.9},
            "lr_scheduler": [{"name": "cosine", "interval": "step"}],
            "train": {"epochs": epochs},
            "executor": {"threads": 1},
            "run": {"checkpoint_every_minutes": 60},
        }
    )  # fmt: skip


def locally(row: Recipe, folder: Path) -> Run:
    """Train the same recipe in this process; its steps are not counted."""
    run = plateaux.train(row, folder / "local", **GIVEN.keywords())
    (folder / "steps").unlink()
    return run


def at_work(out: str | Path) -> list[JobRecord]:
    """Return the records of jobs whose process lives."""
    with suppress(PlateauxError):
        running = [each for each in load_records(Run.open(out)) if each.outcome == "running"]
        return [each for each in running if Path(f"/proc/{each.pid}").exists()]
    return []


def strike(out: str | Path, members: list[int] | None = None, *, seconds: float = 120) -> None:
    """Kill the process of a job, of these members if some are named, as soon as one is at work."""

    def struck() -> bool:
        for each in at_work(out):
            if members is None or list(each.members) == members:
                with suppress(ProcessLookupError):  # it ended just now: another will do
                    os.kill(each.pid, signal.SIGKILL)
                    return True
        return False

    wait_until(struck, seconds=seconds)


class Watching(Thread):
    """Does something to a run while it goes on; what goes wrong there fails the test."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self.work, self.problem = work, None
        self.start()

    def run(self) -> None:
        try:
            self.work()
        except BaseException as problem:
            self.problem = problem  # type: ignore[assignment]

    def end(self, *, seconds: float = 60) -> None:
        self.join(seconds)
        assert not self.is_alive()
        if self.problem is not None:
            raise self.problem


def test_twenty_kills_and_five_lost_nodes_do_not_change_a_bit(nodes: Nodes, tmp_path: Path) -> None:
    """Five members on two nodes, killed around a data partition. The short version kills less often."""
    kills, losses, epochs, pause = (20, 5, 24, 0.2) if LONG else (2, 1, 4, 0.05)
    row = recipe(tmp_path, {"name": "sharpbalance", "rho": 0.1}, members=5, epochs=epochs, pause=pause)
    out, chance, whole = tmp_path / "run", random.Random(4), 5 * epochs * STEPS
    harms = ["kill"] * kills + ["lose"] * losses
    chance.shuffle(harms)

    def harm() -> None:
        for number, kind in enumerate(harms):
            due = 0.9 * whole * (number + chance.random()) / len(harms)
            wait_until(lambda due=due: sum(counted(tmp_path / "steps").values()) >= due, seconds=1200)
            assert training.is_alive()
            time.sleep(chance.uniform(0, 4 * pause))
            if kind == "lose":
                wait_until(lambda: at_work(out), seconds=300)
                nodes.lose(chance.randrange(2))
            else:
                strike(out, seconds=300)

    heard: list[ProgressEvent] = []
    settings = {"name": "ray", "address": nodes.address, "max_retries": 50}
    away = row.replaced(executor=settings)
    training = Watching(lambda: plateaux.train(away, out, **GIVEN.keywords(), progress=heard.append))
    harm()  # in the main thread, where alone nodes can be brought back
    training.end(seconds=1200)
    run = Run.open(out)
    needed = epochs * STEPS
    taken = counted(tmp_path / "steps")
    assert set(taken) == set(range(5))
    lost = sum(taken.values()) - 5 * needed
    assert 0 <= lost <= STEPS * (kills + losses), (lost, taken)
    print(f"{kills} kills, {losses} lost nodes: {lost} of {5 * needed} steps were taken twice")
    assert any(event.retries for event in heard if isinstance(event, MemberUpdate))
    assert all(event.node for event in heard if isinstance(event, MemberUpdate))
    assert distance(weights(locally(row, tmp_path)), weights(run)) == 0


def test_a_run_in_a_bucket_with_server_errors_survives_a_kill(nodes: Nodes, server: Flaky, tmp_path: Path) -> None:
    row = recipe(tmp_path, {"name": "sharpbalance", "rho": 0.1}, pause=0.1)
    out, settings = f"s3://bucket/{tmp_path.name}", {"name": "ray", "address": nodes.address}

    def harm() -> None:
        wait_until(lambda: counted(tmp_path / "steps"))
        strike(out)

    server.share, server.failed = 0.05, 0
    harming = Watching(harm)
    try:
        run = plateaux.train(row.replaced(executor=settings), out, **GIVEN.keywords())
    finally:
        server.share = 0.0
    harming.end()
    assert server.failed > 3
    assert max(each.attempt for each in load_records(run)) == 1
    assert not any(map(run.is_locked, range(3)))
    assert distance(weights(locally(row, tmp_path)), weights(run)) == 0


def test_a_group_that_loses_a_worker_restarts_without_affecting_other_jobs(nodes: Nodes, tmp_path: Path) -> None:
    joint = recipe(tmp_path, {"name": "sed", "diversity_weight": 0.5}, epochs=6, pause=0.1)
    other = tmp_path / "other"
    other.mkdir()
    alone = recipe(other, {"name": "sam", "rho": 0.1}, members=1, epochs=4, pause=0.1)
    settings = {"name": "ray", "address": nodes.address, "num_cpus": 0.5}
    aside = Watching(lambda: plateaux.train(alone.replaced(executor=settings), other / "run", **GIVEN.keywords()))

    def harm() -> None:
        wait_until(lambda: at_work(tmp_path / "run") and counted(tmp_path / "steps").get(0, 0) > STEPS + 1)
        pids = {int(line.split()[1]) for line in (tmp_path / "steps").read_text().splitlines()}
        assert len(pids) == 2  # the members are spread over the group's processes
        os.kill(max(pids), signal.SIGKILL)

    harming = Watching(harm)
    run = plateaux.train(joint.replaced(executor={**settings, "processes": 2}), tmp_path / "run", **GIVEN.keywords())
    harming.end()
    aside.end()
    attempts = [(each.attempt, each.start) for each in load_records(run)]
    assert attempts[0] == (0, (0, 0))
    assert attempts[-1][0] == 1
    assert attempts[-1][1] >= (1, 0)  # from its checkpoint
    assert [each.attempt for each in load_records(Run.open(other / "run"))] == [0]
    assert distance(weights(locally(joint, tmp_path)), weights(run)) == 0


def test_a_member_that_cannot_read_its_data_fails_alone_and_only_it_is_retried(nodes: Nodes, tmp_path: Path) -> None:
    flaw = tmp_path / "flaw"
    row = recipe(tmp_path, {"name": "sam", "rho": 0.1}, flaw=str(flaw))
    flaw.write_text("1")
    settings = {"name": "ray", "address": nodes.address}
    with pytest.raises(PlateauxError, match=r"train member 1 .* failed: KeyError: 'sample 7 cannot be read'"):
        plateaux.train(row.replaced(executor=settings), tmp_path / "run", **GIVEN.keywords())
    run = Run.open(tmp_path / "run")
    assert [each.finished for each in run.all_progress()] == [True, False, True]
    (failed,) = [each for each in load_records(run) if each.outcome == "failed"]
    assert failed.members == (1,)
    assert failed.attempt == 0  # not tried again
    assert "Traceback" in failed.problem
    flaw.unlink()
    before = len(load_records(run))
    plateaux.train(row.replaced(executor=settings), tmp_path / "run", **GIVEN.keywords())
    assert [each.members for each in load_records(run)[before:]] == [(1,)]
    assert distance(weights(locally(row, tmp_path)), weights(run)) == 0


def test_a_partition_proceeds_without_a_failed_member(nodes: Nodes, tmp_path: Path) -> None:
    flaw = tmp_path / "flaw"
    flaw.write_text("2")
    row = recipe(tmp_path, {"name": "sharpbalance", "rho": 0.1}, flaw=str(flaw)).replaced(run={"min_members": 2})
    settings = {"name": "ray", "address": nodes.address}
    with pytest.raises(PlateauxError, match="member 2"):
        plateaux.train(row.replaced(executor=settings), tmp_path / "run", **GIVEN.keywords())
    run = Run.open(tmp_path / "run")
    assert [each.finished for each in run.all_progress()] == [True, True, False]
    assert run.store.get_json("sam_sets/1/summary.json")["without"] == [2]
    assert run.trained_members() == [0, 1]
    assert plateaux.pending_jobs(plateaux.Run.open(run, GIVEN)) == []
    found = plateaux.evaluate(plateaux.Run.open(tmp_path / "run", GIVEN), metrics=["accuracy"])
    assert "member 1" in found[0].rows
    assert "member 2" not in found[0].rows


def test_a_tracker_and_a_callback_have_the_numbers_of_members_on_the_cluster(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    epochs: list[tuple[int, int]] = []

    class Collecting(plateaux.Callback):
        def on_epoch_end(self, run: Run, member: int, epoch: int, metrics: Mapping[str, float]) -> None:
            epochs.append((member, epoch))

    monkeypatch.setenv("TOY_TRACKER", str(tmp_path / "recorded"))
    row = recipe(tmp_path, {"name": "sam", "rho": 0.1}, members=2).replaced(
        executor={"name": "ray", "address": nodes.address}, run={"trackers": ["toy_trackers:Recorder"]}
    )
    options = GIVEN.keywords() | {"trust": (*GIVEN.trust, "toy_trackers"), "callbacks": [Collecting()]}
    run = plateaux.train(row, tmp_path / "run", **options)
    calls = [json.loads(line) for line in (tmp_path / "recorded").read_text().splitlines()]
    sent = {(call["member"], call["step"]): call["values"]["train/loss"] for call in calls if "step" in call}
    assert len(sent) == len([call for call in calls if "step" in call])
    lines = {(member, line["epoch"]): line for member in range(2) for line in run.log(member) if "train loss" in line}
    assert sent == {key: line["train loss"] for key, line in lines.items()}
    assert sorted(epochs) == sorted(lines) == [(member, epoch) for member in range(2) for epoch in (1, 2)]
    assert len({call["pid"] for call in calls}) == 1


def test_a_job_whose_process_dies_too_often_fails(nodes: Nodes, tmp_path: Path) -> None:
    row = recipe(tmp_path, {"name": "sam", "rho": 0.1}, members=2, epochs=3, pause=0.1)
    settings = {"name": "ray", "address": nodes.address, "max_retries": 0}

    harming = Watching(lambda: strike(tmp_path / "run", [0]))
    with pytest.raises(RunError, match=r"member 0 .* died 1 times; no retries are left"):
        plateaux.train(row.replaced(executor=settings), tmp_path / "run", **GIVEN.keywords())
    harming.end()
    assert [each.finished for each in Run.open(tmp_path / "run").all_progress()] == [False, True]


def driver(
    row: Recipe, out: Path, *, env: Mapping[str, str] | None = None, cwd: Path | None = None, **changes: Any
) -> subprocess.Popen[str]:
    file = out.parent / "recipe.toml"
    file.write_text(row.replaced(executor=changes).to_toml())
    call = [sys.executable, "-P", "-m", "plateaux", "train", str(file), "--out", str(out), "--no-evaluate"]
    allowed = [word for name in GIVEN.trust for word in ("--trust", name)]
    return subprocess.Popen([*call, *allowed], stderr=subprocess.PIPE, text=True, env=env, cwd=cwd)


def test_a_stopped_or_killed_driver_trains_no_member_twice(nodes: Nodes, tmp_path: Path) -> None:
    row = recipe(tmp_path, {"name": "sam", "rho": 0.1}, members=2, epochs=6, pause=0.1)
    out, settings = tmp_path / "run", {"name": "ray", "address": nodes.address}

    def steps() -> int:
        return sum(counted(tmp_path / "steps").values())

    with driver(row, out, **settings) as first:
        wait_until(lambda: steps() > 2)
        first.send_signal(signal.SIGINT)
        words = first.communicate(timeout=300)[1]
    assert first.returncode == 75, words
    assert "Run the same command again to resume" in " ".join(words.split())
    assert {each.outcome for each in load_records(Run.open(out))} <= {"stopped", "done"}
    after_stop, held = steps(), [each.position for each in Run.open(out).all_progress()]
    assert sum(epoch * STEPS + step for epoch, step in held) == after_stop  # a polite stop loses nothing
    with driver(row, out, **settings) as second:
        wait_until(lambda: steps() > after_stop + STEPS)
        second.kill()
        assert second.stderr is not None
    wait_until(lambda: not at_work(out))  # the jobs end with their driver
    with driver(row, out, **settings) as third:
        words = third.communicate(timeout=300)[1]
    assert third.returncode == 0, words
    assert 0 <= steps() - 2 * 6 * STEPS <= 2 * STEPS  # at most what two members had done since their checkpoints
    assert distance(weights(locally(row, tmp_path)), weights(Run.open(out))) == 0


def test_predictions_survive_a_lost_node_with_equal_bytes(nodes: Nodes, tmp_path: Path) -> None:
    recipe = {"members": 2, "data": {"name": "digits"}, "model": {"name": "mlp"}, "train": {"epochs": 1}}
    run = plateaux.train(plateaux.Recipe.from_dict(recipe), tmp_path / "run")
    count = 20_000 if LONG else 600
    pixels = np.random.default_rng(0).integers(0, 256, (count, 1, 8, 8), dtype=np.uint8)
    np.save(tmp_path / "x.npy", pixels)
    plateaux.predict(run, tmp_path / "x.npy", tmp_path / "local.csv", batch={"part_size": 60, "threads": 1})
    lost = []

    def lose(event: ProgressEvent) -> None:
        if isinstance(event, WorkDone) and not lost:
            lost.append(event.done)
            nodes.lose(0)

    batch = {"part_size": 60, "executor": "ray", "address": nodes.address}
    result = plateaux.predict(run, tmp_path / "x.npy", tmp_path / "ray.csv", batch=batch, progress=lose)
    assert (result.inputs, result.failed, lost) == (count, 0, [60])
    assert (tmp_path / "ray.csv").read_bytes() == (tmp_path / "local.csv").read_bytes()


def test_a_local_cluster_listens_on_loopback_and_ends_with_the_command(tmp_path: Path) -> None:
    """It also imports nothing from the current folder, which Ray puts on the path of its workers."""
    row, mark = recipe(tmp_path, {"name": "sam", "rho": 0.1}, members=1, epochs=1, pause=0.2), uuid4().hex
    hostile = tmp_path / "hostile"
    hostile.mkdir()
    for name in ("torch", "json", "numpy", "ray", "rayable"):
        (hostile / f"{name}.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'a').write({name!r} + ' ')")
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    env |= {"PYTHONPATH": import_path(), "PLATEAUX_MARK": mark}
    with driver(row, tmp_path / "run", env=env, cwd=hostile, name="ray") as command:
        wait_until(lambda: counted(tmp_path / "steps") or command.poll() is not None)
        found = listening(processes(mark))
        words = command.communicate(timeout=300)[1]
    assert command.returncode == 0, words
    assert not (tmp_path / "imported").exists(), (tmp_path / "imported").read_text()
    assert len(found) > 3
    assert {address for address in found if not address.endswith("0100007F")} == set()  # 127.0.0.1, byte by byte
    wait_until(lambda: not processes(mark), seconds=30)
    assert distance(weights(locally(row, tmp_path)), weights(Run.open(tmp_path / "run"))) == 0


DIGITS_STUDY = """
question = "Does a cluster change a study?"
repetitions = 1
grid = { "method.rho" = [0.0, 0.1] }
evaluate = { metrics = ["accuracy", "nll"] }

[base]
members = 2
data = { name = "digits", limit = 100, test_limit = 50 }
model = { name = "mlp" }
method = { name = "sam", rho = 0.0 }
optimizer = { name = "SGD", lr = 0.1 }
train = { epochs = 1 }
"""


def test_a_study_on_two_nodes_equals_a_local_one(nodes: Nodes, tmp_path: Path) -> None:
    file = tmp_path / "digits.toml"
    file.write_text(DIGITS_STUDY)
    compare_study_on_cluster(str(file), Study.load(file), tmp_path, nodes, runs=2)


def compare_study_on_cluster(name: str, study: Study, folder: Path, nodes: Nodes, runs: int) -> None:
    cluster = ["--executor", "ray", "--address", nodes.address, "--processes", "2"]
    done = CliRunner().invoke(app, ["study", name, "--out", str(folder / "ray"), *cluster])
    assert done.exit_code == 0, done.output
    there = read_results(folder / "ray")
    here = StudyRunner(study, folder / "local", components=GIVEN).run()
    assert len(there["runs"]) == len(here["runs"]) == runs
    for run, results in here["runs"].items():
        assert there["runs"][run]["metrics"] == results["metrics"]  # of the same weights


def test_errors_during_evaluation_are_reported_unchanged(nodes: Nodes) -> None:
    with pytest.raises(RunError, match=r"^nothing about 3$"):
        list(map_reduce(Resources(num_cpus=0.5), [[1], [3]], refusing, lambda *_: 0, None))


def refusing(_: Any, job: int) -> None:
    if job == 3:
        raise RunError("nothing about 3")


def test_a_thousand_jobs_queue_on_two_workers(nodes: Nodes) -> None:
    people, begun = RayWorkerPool(Resources()), time.monotonic()
    heard: list[ProgressEvent] = []
    try:
        jobs = list(range(1000 if LONG else 200))
        assert people.run_jobs([ToyJob(str(job)) for job in jobs], echo, heard.append) == []
    finally:
        people.close()
    echoes = [each["echo"] for each in heard if isinstance(each, dict)]  # not messages
    assert sorted(echoes) == jobs
    assert time.monotonic() - begun < 60 * (1 if LONG else 2)


def echo(job: Any, progress: Any, *, device: str | None = None, processes: int = 1) -> None:
    progress({"echo": int(job.name)})


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="what is told to glibc")
def test_a_worker_reuses_the_memory_of_a_step(nodes: Nodes) -> None:
    people, heard = RayWorkerPool(Resources()), list[Mapping[str, Any]]()
    try:
        assert people.run_jobs([ToyJob("fault")], fault, heard.append) == []
    finally:
        people.close()
    found = next(each for each in heard if isinstance(each, dict))
    assert found["arenas"] == 1  # of several, which one a thread is given is chance: some give back with every step
    assert statistics.median(found["faults"][4:]) < 600  # none; from an arena that gives back, 7,000


def fault(job: Any, progress: Any, *, device: str | None = None, processes: int = 1) -> None:
    """Tell how many pages each of some passes asks of the system, and among how many arenas memory is divided."""
    configure_runtime(threads=1)
    net = resnet(depth=8, shape=(3, 32, 32), classes=10, width=16).to(memory_format=torch.channels_last)
    x = torch.randn(128, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    counts = list[int]()
    for _ in range(25):
        torch.autograd.grad(net(x).logsumexp(1).sum(), list(net.parameters()))
        counts.append(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt)
    progress({"faults": [later - sooner for sooner, later in pairwise(counts)], "arenas": arenas()})


def arenas() -> int:
    """Return among how many arenas glibc divides the memory of this process."""
    libc = ctypes.CDLL("libc.so.6")
    libc.fopen.restype, libc.malloc_info.argtypes, libc.fclose.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_int, ctypes.c_void_p],
        [ctypes.c_void_p],
    )
    with TemporaryDirectory() as folder:
        path = Path(folder, "arenas.xml")
        file = libc.fopen(os.fsencode(path), b"w")
        libc.malloc_info(0, file)
        libc.fclose(file)
        return path.read_text().count("<heap nr=")


def test_a_worker_reports_its_node(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLATEAUX_NODE", "")
    where = RayWorker().describe()
    assert ray.get_runtime_context().get_node_id().startswith(where["node"])
    assert where["address"] not in where["node"]  # the node is stored in the run folder
    assert (where["pid"], where["port"] > 1023) == (os.getpid(), True)


def refuse() -> None:
    raise KeyError("this cannot travel")


class Untravelled:
    """Work that arrives nowhere."""

    def __reduce__(self) -> Any:
        return refuse, ()


def test_a_job_that_cannot_be_pickled_is_reported(nodes: Nodes) -> None:
    people = RayWorkerPool(Resources())
    (failure,) = people.run_jobs([ToyJob("it")], Untravelled(), print)  # type: ignore[arg-type]
    people.close()
    assert "this cannot travel" in str(failure.problem)
    assert not failure.died


# --- Without a cluster


def test_the_example_cluster_files_can_be_read() -> None:
    yaml = pytest.importorskip("yaml")
    folder = HERE.parent / "docs" / "guides" / "cluster"
    job = yaml.safe_load((folder / "kuberay.yaml").read_text())
    assert job["kind"] == "RayJob"
    (group,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert group["template"]["spec"]["containers"][0]["image"].endswith("plateaux:latest")
    subprocess.run(["bash", "-n", str(folder / "slurm.sh")], check=True)


def test_a_missing_ray_is_reported_with_its_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plateaux.distributed.executors.ray.find_spec", lambda _: None)
    with pytest.raises(RecipeError, match=r"plateaux\[ray\]"):
        RayExecutor(None, 1, 0, 0, 1, 1).launch([], echo, print)


@pytest.mark.parametrize("mode", ["disabled", "DISABLED", "k8s"])
def test_a_cluster_without_token_authentication_is_refused(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", mode)
    monkeypatch.setattr(ray, "init", lambda *_, **__: pytest.fail("connected"))
    with pytest.raises(RunError, match="Set RAY_AUTH_MODE=token"):
        RayExecutor(None, 1, 0, 0, 1, 1).launch([], echo, print)


def test_a_connection_without_token_authentication_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr("plateaux.distributed.ray_cluster.get_authentication_mode", lambda: "disabled")
    with pytest.raises(RunError, match="without token authentication"):
        RayExecutor(None, 1, 0, 0, 1, 1).launch([], echo, print)


def test_a_group_must_be_divided_evenly() -> None:
    with pytest.raises(RecipeError, match=r"executor\.data_parallel = 2"):
        on_ray(processes=3, data_parallel=2)
