"""W&B, TensorBoard and Trackio get the names and values of the JSON lines, and the alerts, offline."""

import json
import math
import os
import sqlite3
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from tests.callbacks.replay import ppo
from tests.tiny import prompts
from trl_ext.callbacks import KLBudgetCallback, record_run
from trl_ext.runs.files import read_jsonl

# transformers gives these to W&B as its summary, and to Trackio not at all
SUMMARY = {"train_runtime", "train_samples_per_second", "train_steps_per_second", "train_loss", "total_flos"}
# What W&B adds, and seconds that TRL sends to W&B and Trackio beside the logs
NOT_LOGGED = ("_", "profiling/")


def train(folder):
    """One tiny run whose monitor alerts, as a user's script has it."""
    trackers = {"report_to": ["wandb", "tensorboard", "trackio"], "project": "project", "run_name": "run"}
    evaluated = {"eval_dataset": prompts(4, seed=1), "eval_strategy": "steps", "eval_steps": 4}
    # A key by name has no spread: each log counts as it is
    budget = KLBudgetCallback(warn=0.01, limit=0.02, keys={"kl": "objective/kl"})
    settings = {"learning_rate": 0.05, "max_steps": 8, **trackers, **evaluated}
    trainer = ppo(folder / "run", budget, **settings)
    record_run(trainer)
    trainer.train()


def wandb_records(path):
    """The records of an offline run: 32 kB blocks of chunks with a checksum, a length and whether more follows."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, message = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        message += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # the whole of a record, or its last chunk
            record = Record()
            record.ParseFromString(message)
            yield record
            message = b""


def of_wandb(folder):
    """Points by key and step; alerts' titles."""
    points, alerts = {}, []
    for record in wandb_records(next(folder.glob("wandb/offline-run-*/*.wandb"))):
        if record.WhichOneof("record_type") == "alert":
            alerts.append(record.alert.title)
        if record.WhichOneof("record_type") == "history":
            items = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item
            }
            points |= {
                (key, items["train/global_step"]): value
                for key, value in items.items()
                if "train/global_step" in items
            }
    return points, alerts


def of_tensorboard(folder):
    from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

    runs = EventMultiplexer().AddRunsFromDirectory(str(folder / "run" / "runs")).Reload()
    points, alerts = {}, []
    for run, tags in runs.Runs().items():
        points |= {(tag, event.step): event.value for tag in tags["scalars"] for event in runs.Scalars(run, tag)}
        for tag in tags["tensors"]:
            if tag.startswith("alerts/"):
                alerts += [event.tensor_proto.string_val[0].decode() for event in runs.Tensors(run, tag)]
    return points, alerts


def of_trackio(folder):
    points = {}
    with sqlite3.connect(folder / "trackio" / "project.db") as database:
        for (row,) in database.execute("SELECT metrics FROM metrics ORDER BY step"):
            values = json.loads(row)
            if "train/global_step" in values:
                points |= {(key, values["train/global_step"]): value for key, value in values.items()}
        alerts = [title for (title,) in database.execute("SELECT title FROM alerts")]
    return points, alerts


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """In a process of its own, with a W&B service of its own: trackers read their settings once, when imported."""
    for package in ("wandb", "tensorboard", "trackio"):
        pytest.importorskip(package)
    folder = tmp_path_factory.mktemp("trackers")
    offline = {"WANDB_MODE": "offline", "WANDB_DIR": str(folder), "TRACKIO_DIR": str(folder / "trackio")}
    paths = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}
    command = [sys.executable, "-m", "tests.callbacks.test_trackers", str(folder)]
    mine = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}  # it writes when it ends
    subprocess.run(command, env={**mine, **offline, **paths}, check=True, timeout=300, cwd=folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("read", [of_wandb, of_tensorboard, of_trackio])
def test_names_and_values_are_those_of_the_json_lines(read, folder):
    points, alerts = read(folder)
    expected = {}
    for event in read_jsonl(folder / "run" / "metrics.rank0.jsonl"):
        for key, value in event.get("logs", {}).items():
            name = f"eval/{key.removeprefix('eval_')}" if key.startswith("eval_") else f"train/{key}"
            if key not in SUMMARY:
                expected[name, event["step"]] = value
    assert {"train/objective/kl", "eval/objective/scores", "train/rewards/length_reward/mean"} < {
        n for n, _ in expected
    }
    of_the_run = {point for point in points if not point[0].startswith(NOT_LOGGED)}
    extra = {name.removeprefix("train/") for name, _ in of_the_run - expected.keys()}
    assert expected.keys() <= of_the_run and extra <= {*SUMMARY, "global_step"}
    for point, value in expected.items():
        assert math.isclose(points[point], value, rel_tol=1e-6, abs_tol=1e-30), point
    said = [alert for alert in read_jsonl(folder / "run" / "alerts.jsonl") if alert["what"] in "".join(alerts)]
    assert said and len(alerts) == len(list(read_jsonl(folder / "run" / "alerts.jsonl")))


if __name__ == "__main__":
    train(Path(sys.argv[1]))
