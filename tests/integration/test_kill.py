"""A killed and resumed run ends bit for bit like an uninterrupted run."""

from __future__ import annotations

import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import weights_path
from killable import BY_WORKERS, IN_MEMORY, RECIPE, write_images
from waiting import wait_until

from plateaux.config.recipe import Recipe
from plateaux.storage.atomic import PARTIAL_PREFIX
from plateaux.storage.local_store import SCRATCH_PREFIX
from plateaux.storage.run import MemberProgress, Run

HERE = Path(__file__).parents[1]  # the folder of the helpers
LONG = os.environ.get("PLATEAUX_LONG") == "1"
ENVIRONMENT = {
    # Lines of trainers that are killed cannot be counted; counting them all the same would double the time.
    **{name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")},
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, sys.path)]),
}
Ask = Callable[..., dict[str, Any]]

SMALL = """
members = 2
[data]
name = "blobs"
samples = 40
test_samples = 12
batch_size = 16
validation_split = 8
[model]
name = "mlp"
hidden_sizes = [4]
[method]
name = "sam"
[optimizer]
name = "SGD"
lr = 0.2
momentum = 0.9
[[lr_scheduler]]
name = "multistep"
milestones = [1]
[train]
epochs = 2
{train}
[executor]
threads = 1
[run]
checkpoint_every_minutes = {minutes}
log_every = 2
"""


pytestmark = pytest.mark.xdist_group("kill")  # one worker starts the server and trains the whole runs once


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    """Return the function that lets the server train, and says how that ended."""
    server = subprocess.Popen(
        [sys.executable, "-c", "import killable; killable.serve()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    assert server.stdin is not None
    assert server.stdout is not None

    def send(recipe: Path, out: Path, **death: Any) -> dict[str, Any]:
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps({"recipe": str(recipe), "out": str(out), **death}) + "\n")
        server.stdin.flush()
        return dict(json.loads(server.stdout.readline()))

    yield send
    server.stdin.close()
    server.wait(timeout=30)
    server.stdout.close()


@pytest.fixture(scope="module", params=["in memory", "by workers"])
def recipe(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param.replace(" ", "_"))
    write_images(folder)
    data = IN_MEMORY.format(folder=folder) if request.param == "in memory" else BY_WORKERS
    file = folder / "recipe.toml"
    file.write_text(RECIPE.format(data=data, epochs=4 if request.param == "in memory" else 2))
    return file


@pytest.fixture(scope="module")
def whole(recipe: Path, ask: Ask) -> Path:
    """The uninterrupted run."""
    out = recipe.parent / "whole"
    assert ask(recipe, out) == {"status": 0, "words": ""}
    return out


def small(folder: Path, *, train: str = 'select = "best:accuracy"', minutes: float = 1e-9) -> Path:
    file = folder / "small.toml"
    file.write_text(SMALL.format(train=train, minutes=minutes))
    return file


MEETING = """
members = 3
[data]
name = "blobs"
samples = 48
test_samples = 12
batch_size = 16
validation_split = 8
[model]
name = "mlp"
hidden_sizes = [4]
[method]
name = "sharpbalance"
rho = 0.1
[optimizer]
name = "SGD"
lr = 0.2
momentum = 0.9
[train]
epochs = 2
[executor]
threads = 1
mode = "{manner}"
[run]
checkpoint_every_minutes = 60
keep_checkpoints = "last"
"""


def has_checkpoint(out: Path, number: int) -> bool:
    file = out / f"members/{number}/progress.json"
    return file.exists() and bool(json.loads(file.read_text())["checkpoints"])


def command(recipe: Path, out: Path) -> list[str]:
    call = [sys.executable, "-m", "plateaux", "train", str(recipe), "--out", str(out), "--trust", "killable"]
    return [*call, "--no-evaluate"]


def same(left: Any, right: Any) -> bool:
    """Say whether nested values are equal to the last bit."""
    if isinstance(left, torch.Tensor):
        return (
            left.dtype == right.dtype
            and left.shape == right.shape
            and left.numpy().tobytes() == right.numpy().tobytes()
        )
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def plain(progress: MemberProgress, without: Collection[str]) -> str:
    """Return the progress as text, without some fields and the ids of the attempts."""
    fields = {name: value for name, value in asdict(progress).items() if name not in without}
    return re.sub(r"-[0-9a-f]{8}\.", ".", json.dumps(fields))


def assert_same_run(found: Path, wanted: Path) -> None:
    """Weights, optimiser, schedule, logs and progress are those of the undisturbed run, and nothing is left over."""
    one, other = Run.open(found), Run.open(wanted)
    for number in range(one.recipe.members):
        here, there = one.progress(number), other.progress(number)
        assert here.finished
        when = {
            "seconds",
            "log_parts",
            "digests",
        }  # what depends on the clock: how long it took, and into what parts the log was cut
        assert plain(here, when) == plain(there, when)
        assert weights_path(found, number).read_bytes() == weights_path(wanted, number).read_bytes()
        assert one.log(number) == other.log(number)
        for (*_, name), (*_, same_name) in zip(here.checkpoints, there.checkpoints, strict=True):
            mine, theirs = one.store.get_state(name), other.store.get_state(same_name)
            assert mine.keys() == theirs.keys()
            assert same({**mine, "progress": None}, {**theirs, "progress": None})
        expected = {
            "progress.json",
            weights_path(found, number).name,
            ".lock",
            *(Path(name).name for *_, name in here.checkpoints),
        }
        expected |= {Path(here.partition_checkpoint).name} if here.partition_checkpoint else set()
        assert {p.name for p in (found / f"members/{number}").iterdir() if p.is_file()} == expected
        assert len(list((found / f"members/{number}/log").iterdir())) == len(here.log_parts)
    assert not list(found.rglob(f"{SCRATCH_PREFIX}*"))


def test_twenty_kills_at_random_times_do_not_change_a_bit(recipe: Path, whole: Path, ask: Ask) -> None:
    chance, real = random.Random(20), "killable" not in recipe.read_text()
    outs = [recipe.parent / "killed-0"]
    if real:  # the first start and the last are the real command, which takes seconds
        with subprocess.Popen(command(recipe, outs[0]), env=ENVIRONMENT, stderr=subprocess.DEVNULL) as first:
            wait_until(lambda: has_checkpoint(outs[0], 2))
            first.kill()
    kills = 0
    while kills < 20:
        # In the middle of a checkpoint, before and after the rename; and wherever the clock finds it.
        clock = {"seconds": chance.uniform(0.0, 0.4 if real else 0.8)}
        answer = ask(recipe, outs[-1], **({"event": chance.randint(1, 60)} if kills % 2 else clock))
        assert answer["status"] in (-signal.SIGKILL, 0), answer
        kills += answer["status"] != 0
        if answer["status"] == 0:  # it came to its end, so another one is killed
            outs.append(recipe.parent / f"killed-{len(outs)}")
    last = subprocess.run(command(recipe, outs[-1]), env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert last.returncode == 0, last.stderr
    for out in outs:
        assert_same_run(out, whole)


def test_a_kill_at_every_storage_operation_does_not_change_a_bit(tmp_path: Path, ask: Ask) -> None:
    recipe, alone = small(tmp_path, minutes=60), ["members=1"]
    assert ask(recipe, tmp_path / "whole", set=alone)["status"] == 0
    halves = 0
    for event in range(1, 1000):
        out = tmp_path / str(event)
        if ask(recipe, out, event=event, set=alone)["status"] == 0:
            break  # the run touches storage less often than that
        halves += bool(list(out.rglob(f"{PARTIAL_PREFIX}*")))
        assert ask(recipe, out, set=alone)["status"] == 0, event
        assert_same_run(out, tmp_path / "whole")
        assert not list((out / "members").rglob(f"{PARTIAL_PREFIX}*"))
    assert event > 40
    assert halves > 20  # so writes were indeed cut


def test_a_kill_before_early_stopping_is_recorded_does_not_extend_training(tmp_path: Path, ask: Ask) -> None:
    # lr = 0: never better than after the first epoch, so that patience runs out after the second.
    recipe = small(tmp_path, train='early_stopping_patience = 1\nselect = "last"', minutes=60)
    changes = ["optimizer.lr=0.0", "train.epochs=6", "members=1"]
    assert ask(recipe, tmp_path / "whole", set=changes)["status"] == 0
    assert Run.open(tmp_path / "whole").progress(0).epoch == 2
    tried = 0
    for event in range(20, 1000):
        out = tmp_path / str(event)
        if ask(recipe, out, event=event, set=changes)["status"] == 0:
            break
        progress = Run.open(out).progress(0)
        if progress.epoch == 2 and not progress.finished:
            tried += 1
            assert ask(recipe, out, set=changes)["status"] == 0
            assert_same_run(out, tmp_path / "whole")
    assert tried > 2


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_sigterm_ends_with_a_checkpoint_and_a_message(recipe: Path, whole: Path, ask: Ask, name: str) -> None:
    out = recipe.parent / name
    ends = []
    for _ in range(2):
        # As a terminal or a scheduler does, to the whole group: the loader's workers die of it at once.
        answer = ask(recipe, out, signal=name, event=30, group=True)  # after the claims
        assert answer["words"].startswith("Interrupted: Stopped at epoch ")
        assert answer["words"].endswith("with a checkpoint. Run the same command again to resume")
        run = Run.open(out)
        ends.append(run.progress(0).position)
        assert all(p.checkpoints[-1][:2] == p.position == ends[-1] for p in run.all_progress())
    assert ends[0] < ends[1]
    assert ask(recipe, out, set=["run.checkpoint_every_minutes=10"])["status"] == 0
    assert_same_run(out, whole)


def test_the_command_prints_how_to_resume_and_exits_with_75(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with subprocess.Popen(
        [*command(small(tmp_path), out), "--set", "train.epochs=100000"],
        env=ENVIRONMENT,
        stderr=subprocess.PIPE,
        text=True,
    ) as going:
        wait_until(lambda: has_checkpoint(out, 1))
        held = Run.open(out).is_locked(0)
        going.send_signal(signal.SIGINT)
        words = going.communicate(timeout=30)[1]
    assert held
    assert going.returncode == 75
    assert "with a checkpoint. Run the same command again to resume" in " ".join(words.split())
    assert "Traceback" not in words


def test_a_member_is_locked_until_its_process_ends(recipe: Path, ask: Ask) -> None:
    out = recipe.parent / "locked"
    assert ask(recipe, out, event=30)["status"] == -signal.SIGKILL
    # With a loader the killed trainer's workers live on for seconds; they must not hold its lock.
    run = Run.open(out)
    assert not any(map(run.is_locked, range(3)))
    with run.store.lock("members/1"):
        answer = ask(recipe, out)
        assert answer["status"] == 1
        assert answer["words"].startswith("RunError: ")
        assert "members/1 is locked by another process; wait for it to finish, or stop it" in answer["words"]
    assert ask(recipe, out, set=["run.checkpoint_every_minutes=10"])["status"] == 0


class Wrapped(torch.optim.Optimizer):
    """SAM as it is most often copied: around another optimiser, whose momentum its own state does not hold."""

    def __init__(self, params: Any, *, rho: float, lr: float, momentum: float) -> None:
        super().__init__(params, {"rho": rho})
        self.base = torch.optim.SGD([{"params": group["params"]} for group in self.param_groups], lr, momentum)

    @torch.no_grad()
    def first_step(self, zero_grad: bool) -> None:
        for group in self.param_groups:
            norm = torch.stack([p.grad.norm() for p in group["params"]]).norm()
            for p in group["params"]:
                self.state[p]["home"] = p.clone()
                p.add_(p.grad, alpha=group["rho"] / float(norm))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad: bool) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(self.state[p]["home"])
        self.base.step()
        self.zero_grad()


def lost_on_the_way(make: Callable[[Any], Any]) -> float:
    """Return how far ten steps end from five steps, a save, a load and five more."""

    def start() -> tuple[torch.nn.Module, Any]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
        return model, make(model.parameters())

    def advance(model: torch.nn.Module, optimizer: Any, steps: range) -> None:
        for number in steps:
            chance = torch.Generator().manual_seed(number)
            x, y = torch.randn(16, 4, generator=chance), torch.randint(3, (16,), generator=chance)
            for move in (optimizer.first_step, optimizer.second_step):
                torch.nn.functional.cross_entropy(model(x), y).backward()
                move(zero_grad=True)

    straight, optimizer = start()
    advance(straight, optimizer, range(10))
    before, optimizer = start()
    advance(before, optimizer, range(5))
    file = io.BytesIO()
    torch.save([before.state_dict(), optimizer.state_dict()], file)
    file.seek(0)
    weights, state = torch.load(file)
    after, optimizer = start()
    after.load_state_dict(weights)
    optimizer.load_state_dict(state)
    advance(after, optimizer, range(5, 10))
    pairs = zip(straight.state_dict().values(), after.state_dict().values(), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


def test_resuming_sam_is_exact_where_the_common_wrapper_loses_momentum(tmp_path: Path, ask: Ask) -> None:
    from pytorch_optimizer import SAM

    # The wrapper is what pytorch_optimizer was until 3.9; since 4 it keeps the momentum, as it should.
    assert lost_on_the_way(lambda params: Wrapped(params, rho=0.05, lr=0.1, momentum=0.9)) > 1e-3
    assert lost_on_the_way(lambda params: SAM(params, torch.optim.SGD, rho=0.05, lr=0.1, momentum=0.9)) == 0
    recipe = small(tmp_path, train='select = "last"')
    assert ask(recipe, tmp_path / "whole")["status"] == 0
    kills = 0
    while ask(recipe, tmp_path / "stopped", event=40)["status"] != 0:
        kills += 1
    straight, after = Run.open(tmp_path / "whole"), Run.open(tmp_path / "stopped")
    for number in range(2):
        here, there = straight.weights(number), after.weights(number)
        assert max(float((here[name] - there[name]).abs().max()) for name in here) == 0
    assert kills > 1


def test_the_recipe_of_these_tests_covers_the_relevant_state(recipe: Path) -> None:
    what = Recipe.load(recipe)
    assert (what.method.name, what.optimizer.options, what.lr_scheduler[0].interval) == (
        "sam",
        {"momentum": 0.9},
        "step",
    )
    assert what.model.options["norm"] == "batch"
    assert what.data.flip


def _partition_files(out: Path) -> dict[str, bytes]:
    folders = [out / "sharpness", out / "sam_sets"]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in files}


@pytest.mark.timeout(1800)  # dozens of processes: minutes on a loaded machine
@pytest.mark.parametrize("manner", ["loop", "offload"])
def test_a_kill_at_every_step_of_a_partition_does_not_change_a_bit(manner: str, tmp_path: Path, ask: Ask) -> None:
    recipe = tmp_path / "partition.toml"
    recipe.write_text(MEETING.format(manner=manner))
    whole = tmp_path / "whole"
    assert ask(recipe, whole)["status"] == 0
    assert len(_partition_files(whole)) == 2 * (3 + 3) + 1  # arrays, their digests, and the summary

    base = tmp_path / "base"
    for batch in (1, 1, 2):  # while scoring; in `parked` the first member's scores, then the second's
        assert ask(recipe, base, score=batch)["status"] == -signal.SIGKILL

    def killed(event: int) -> set[str] | None:
        """Kill a run at a touch of storage and resume it; return how far it had come, and None if it ended before."""
        out = tmp_path / str(event)
        shutil.copytree(base, out)
        if ask(recipe, out, event=event)["status"] == 0:
            return None
        stage = _half_way(out)
        assert ask(recipe, out)["status"] == 0, event
        assert_same_run(out, whole)
        assert _partition_files(out) == _partition_files(whole), event
        return stage

    # At every touch of storage; in the short version at every few, and in a loop at all where a stage begins or ends.
    stages: dict[int, set[str] | None] = {0: set()}
    stride = 1 if LONG else {"loop": 6, "offload": 4}[manner]
    for event in range(stride, 1000, stride):
        stages[event] = killed(event)
        if manner == "loop" and stages[event] != stages[event - stride]:
            stages |= {skipped: killed(skipped) for skipped in range(event - stride + 1, event)}
        if stages[event] is None:
            break
    seen = set[str]().union(*filter(None, stages.values()))
    assert event > 30
    assert seen == {"some have scored", "all have scored", "a note", "all notes", "decided"}


def _half_way(out: Path) -> set[str]:
    """Return how far a killed run had come in its data partition."""
    files = [name for name in _partition_files(out) if PARTIAL_PREFIX not in name]
    arrays = [name for name in files if name.endswith(".safetensors")]
    scores, notes = (sum(name.startswith(kind) for name in arrays) for kind in ("sharpness", "sam_sets"))
    said = {0: set(), 3: {"all have scored"}}.get(scores, {"some have scored"})
    if notes:
        said = {"decided"} if "sam_sets/1/summary.json" in files else {"all notes"} if notes == 3 else {"a note"}
    return said
