"""Figures of a step reach the real trackers, offline. Each tracker runs in a process of its own: they start threads."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forkpoint import Client
from forkpoint.trackers import StepTracker
from tests.proxy.serving import Running, serving

ROOT = Path(__file__).parents[2]
WANDB = """
import glob, time, wandb
from wandb.proto.wandb_internal_pb2 import Record
run = wandb.init(project="p", mode="offline", dir=folder)
tracker = StepTracker(client, to_wandb(run), labels={"run": "a"})
tracker.log(0), tracker.log(1)
run.finish()
# The file of an offline run is LevelDB's log: 7 bytes, then records with 4 bytes of checksum, length and kind.
def rows():
    data, at = open(glob.glob(f"{folder}/wandb/offline-run-*/*.wandb")[0], "rb").read(), 7
    while at < len(data):
        size = int.from_bytes(data[at + 4 : at + 6], "little")
        items = Record.FromString(data[at + 7 : at + 7 + size]).history.item
        row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
        if row:
            yield [row["forkpoint/step"], row["forkpoint/hit_rate"]]
        at += 7 + size
# W&B's own process writes the records, sometimes a moment after `finish`.
until = time.monotonic() + 30
while len(seen := list(rows())) < 2 and time.monotonic() < until:
    time.sleep(0.05)
print(json.dumps(seen))
"""
MLFLOW = """
import mlflow
mlflow.set_tracking_uri(f"file:{folder}/runs")
with mlflow.start_run() as run:
    tracker = StepTracker(client, to_mlflow(), labels={"run": "a"})
    tracker.log(0), tracker.log(1)
history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "forkpoint/hit_rate")
print(json.dumps([[each.step, each.value] for each in history]))
"""
TENSORBOARD = """
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary import Writer
from tensorboard.util.tensor_util import make_ndarray
writer = Writer(folder)
tracker = StepTracker(client, to_tensorboard(writer), labels={"run": "a"})
tracker.log(0), tracker.log(1)
writer.close()
events = EventAccumulator(folder).Reload().Tensors("forkpoint/hit_rate")
print(json.dumps([[each.step, float(make_ndarray(each.tensor_proto))] for each in events]))
"""
TRAINER = """
from transformers import TrainerCallback, TrainerControl, TrainerState
from forkpoint.trackers import trainer_callback
seen = []
callback = trainer_callback(StepTracker(client, lambda figures, step: seen.append(step), labels={"run": "a"}))
assert isinstance(callback, TrainerCallback)
logs = {}
callback.on_step_end(None, TrainerState(global_step=2), TrainerControl())
callback.on_log(None, TrainerState(), TrainerControl(), logs=logs)
print(json.dumps([seen, logs["forkpoint/hit_rate"]]))
"""


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Step 0 has one rollout, which misses twice; step 1 has another with two hits."""
    with serving(tmp_path_factory.mktemp("data")) as running:
        for step in (0, 1):
            for command in ("echo one > f", "cat f"):
                running.client.post(
                    f"/t/task/r/{step}/shell/exec", json={"command": command},
                    headers={"x-forkpoint-labels": f"run=a,step={step},reward={step}"},
                ).raise_for_status()  # fmt: skip
        yield running


def run(program: str, proxy: Running, folder: Path, *, python: str = sys.executable) -> Any:
    """Run a program with a client, the sinks and a folder; return what its last line prints."""
    head = (
        "import json, sys\nfrom forkpoint import Client\n"
        "from forkpoint.trackers import StepTracker, to_mlflow, to_tensorboard, to_wandb\n"
        "client, folder = Client(sys.argv[1], trust_env=False), sys.argv[2]\n"
    )
    quiet = {
        "PYTHONWARNINGS": "ignore",
        "WANDB_SILENT": "true",
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(ROOT),
    }
    command = [python, "-c", head + program, str(proxy.client.base_url), str(folder)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, cwd=folder,
        env={**os.environ, **quiet, "HOME": str(folder)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_figures_are_those_of_the_step(proxy: Running) -> None:
    seen: list[Any] = []
    with Client(str(proxy.client.base_url), labels={"run": "a"}, trust_env=False) as client:
        tracker = StepTracker(client, lambda figures, step: seen.append((step, dict(figures))))
        first, second, none = (tracker.log(step) for step in (0, 1, 2))
        assert StepTracker(client, labels={"run": "b"}).log(0) == {}
    assert (first["forkpoint/hit_rate"], second["forkpoint/hit_rate"], none) == (0, 1, {})
    assert (first["forkpoint/saved_s"], second["forkpoint/executed_s"]) == (0, 0)
    assert (second["forkpoint/saved_share"], second["forkpoint/reward"]) == (1, 1)
    assert seen == [(0, first), (1, second)]


def test_unreachable_proxy_does_not_end_training(caplog: pytest.LogCaptureFixture) -> None:
    with Client("http://127.0.0.1:9", trust_env=False) as client:
        assert StepTracker(client).log(3) == {}
    assert "step 3" in caplog.text


def test_wandb_has_the_figures(proxy: Running, tmp_path: Path) -> None:
    assert run(WANDB, proxy, tmp_path) == [[0, 0], [1, 1]]


def test_mlflow_has_the_figures(proxy: Running, tmp_path: Path) -> None:
    assert run(MLFLOW, proxy, tmp_path) == [[0, 0], [1, 1]]


def test_tensorboard_has_the_figures(proxy: Running, tmp_path: Path) -> None:
    assert run(TENSORBOARD, proxy, tmp_path) == [[0, 0], [1, 1]]


def test_trainer_logs_the_figures(proxy: Running, tmp_path: Path) -> None:
    python = os.environ.get("FORKPOINT_TRL_PYTHON")
    if not python:
        pytest.skip("FORKPOINT_TRL_PYTHON names no Python with transformers and httpx; `.ci/trl` makes one")
    assert run(TRAINER, proxy, tmp_path, python=python) == [[1], 1]
