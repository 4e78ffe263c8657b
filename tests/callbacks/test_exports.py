"""The exports of a run: JSON lines, Prometheus and the picture."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import matplotlib.image
import numpy as np
import pytest
import torch
import wandb
from datasets import Dataset
from huggingface_hub.utils import filter_repo_objects
from matplotlib.figure import Figure
from transformers import TrainerState

import trl_ext.callbacks
from tests.callbacks.replay import Replay
from tests.tiny import length_reward, prompts, tiny_config, tiny_llama, tiny_tokenizer
from trl_ext import PPOTrainer
from trl_ext.callbacks import (
    AnswersCallback,
    JSONLCallback,
    KLBudgetCallback,
    MonitoringPlotCallback,
    PrometheusCallback,
    SamplesCallback,
    record_run,
)
from trl_ext.callbacks.metrics import METRICS, curve, metrics_of, rollout_steps
from trl_ext.callbacks.plot import PANELS
from trl_ext.callbacks.prometheus import GAUGES
from trl_ext.callbacks.recording import ReportCallback
from trl_ext.runs.jsonl import JSONLWriter, read_jsonl
from trl_ext.stages import ResumableSFTTrainer, SFTConfig
from trl_ext.workbench import report_of

TOKEN = "hf_" + "aB3dE5gH7jK9mN1pQ3sT5vX7zA9cE1gH3j"
LOG = {
    "loss": 0.5,
    "objective/kl": 2.0,
    "objective/scores": 1.0,
    "objective/scores_std": 0.5,
    "policy/entropy_avg": 2.5,
    "policy/clipfrac_avg": 0.1,
    "val/explained_variance": 0.3,
    "loss/value_avg": 4.0,
    "loss/policy_avg": -0.1,
    "completions/mean_length": 7.0,
    "completions/min_length": 2.0,
    "completions/max_length": 8.0,
    "grad_norm": 3.0,
    "num_tokens": 100.0,
    "time/generate": 0.5,
    "time/score": 0.25,
}


# ---- JSONL ----


def test_events(tmp_path):
    run = Replay(tiny_config(tmp_path), KLBudgetCallback(), JSONLCallback())
    run.log(1, logs=LOG)
    run.log(2, logs={"loss": math.nan, "num_tokens": 300.0})
    run.evaluate(2, {"eval_objective/scores": 1.5})
    run.fire("on_save")
    run.fire("on_log", logs={"train_runtime": 3.0})
    events = list(read_jsonl(tmp_path / "metrics.rank0.jsonl"))
    assert [(e["type"], e["step"]) for e in events] == [
        ("begin", 0),
        ("train", 1),
        ("train", 2),
        ("eval", 2),
        ("save", 2),
        ("end", 2),
    ]
    assert events[0]["config"]["learning_rate"] == 1e-3 and events[0]["config_class"] == "PPOConfig"
    assert len(events[0]["run"]) == 12
    first, second = events[1:3]
    assert (first["kl"], first["loss"], first["loss/value_avg"]) == (2.0, 0.5, 4.0)
    assert (first["seconds_generation"], first["seconds_scoring"]) == (0.5, 0.25)
    # What cannot be measured is absent: the first log has no time to divide by, and there is no GPU here
    assert not {"tokens_per_sec_per_gpu", "seconds_update", "vram_allocated_bytes"} & set(first)
    assert second["tokens_per_sec_per_gpu"] > 0 and second["loss"] == "nan" and "kl" not in second
    assert first["monitors"]["KLBudgetCallback"]["limit"] == 10.0 and "monitors" not in second
    assert all(e["rank"] == 0 and e["timestamp"] > 1e9 for e in events)


def test_gpu_memory_where_there_is_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 123)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 456)
    run = Replay(tiny_config(tmp_path), JSONLCallback())
    run.log(1, logs=LOG)
    event = list(read_jsonl(tmp_path / "metrics.rank0.jsonl"))[-1]
    assert (event["vram_allocated_bytes"], event["vram_peak_bytes"]) == (123, 456)


def test_a_folder_that_cannot_be_written_ends_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    run = Replay(tiny_config(tmp_path), JSONLCallback(folder=str(tmp_path / "file")))
    args = tiny_config(tmp_path)
    args.output_dir = str(tmp_path / "file")
    drawing = Replay(args, MonitoringPlotCallback(), PrometheusCallback(textfile=str(tmp_path / "file" / "x.prom")))
    for one in (run, drawing):
        one.log(1, logs=LOG)
        one.fire("on_train_end")


KILLED = """
import os, signal, sys
from trl_ext.runs.jsonl import JSONLWriter
writer = JSONLWriter(sys.argv[1])
for i in range(100):
    writer.write({"i": i})
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_killed_run_keeps_its_lines_and_the_next_one_starts_on_a_line_of_its_own(tmp_path):
    path = tmp_path / "events.jsonl"
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    run = subprocess.run([sys.executable, "-c", KILLED, str(path)], cwd=root, env=environment)
    assert run.returncode == -signal.SIGKILL
    assert [row["i"] for row in read_jsonl(path)] == list(range(100))
    os.truncate(path, path.stat().st_size - 4)  # as if killed within the last line
    JSONLWriter(path).write({"i": 100})
    assert [row["i"] for row in read_jsonl(path)] == [*range(99), 100]


def test_a_run_that_is_resumed_keeps_its_id_and_another_one_has_its_own(tmp_path):
    def begin(step):
        Replay(tiny_config(tmp_path), JSONLCallback(), state=TrainerState(global_step=step))
        return [event["run"] for event in read_jsonl(tmp_path / "metrics.rank0.jsonl")]

    assert len(set(begin(0))) == 1 and len(set(begin(2))) == 1
    assert len(set(begin(0))) == 2
    ids = begin(4)  # of the second run
    assert len(set(ids)) == 2 and ids[-1] == ids[-2] != ids[0]


def test_a_second_run_of_one_callback_is_measured_from_its_start(tmp_path):
    callback = JSONLCallback()
    for _ in range(2):
        run = Replay(tiny_config(tmp_path), KLBudgetCallback(), callback)
        run.log(1, logs=LOG)
    events = [event for event in read_jsonl(tmp_path / "metrics.rank0.jsonl") if event["type"] == "train"]
    assert all("monitors" in event and "tokens_per_sec_per_gpu" not in event for event in events)


# ---- Samples ----


@pytest.mark.slow
def test_samples_are_of_each_rollout_few_and_not_of_an_evaluation(tmp_path):
    args = tiny_config(tmp_path, max_steps=8, eval_strategy="steps", eval_steps=1)
    trainer = PPOTrainer(
        model=tiny_llama(),
        reward_funcs=[length_reward, lambda completions, **kwargs: [None] + [2.0] * (len(completions) - 1)],
        args=args,
        train_dataset=prompts(),
        eval_dataset=Dataset.from_dict({"prompt": ["big big big"] * 4}),
        processing_class=tiny_tokenizer(),
    )
    record_run(trainer)
    trainer.add_callback(SamplesCallback(trainer=trainer, per_rollout=3))
    trainer.train()
    rows = list(read_jsonl(tmp_path / "completions.rank0.jsonl"))
    assert [row["step"] for row in rows] == [0] * 3 + [4] * 3  # two rollouts of four steps
    assert all(row["scores"]["length_reward"] == len(row["completion"].split()) for row in rows)
    assert [row["scores"]["<lambda>"] for row in rows] == [None, 2.0, 2.0] * 2
    assert {row["prompt"] for row in rows} <= set(prompts()["prompt"])
    with pytest.raises(ValueError, match="Replay keeps none: use a watch of `trl_ext.rewards` there"):
        SamplesCallback(trainer=Replay(args))


@pytest.mark.slow
def test_a_run_of_sft_answers_prompts_before_while_and_after_it_trains(tmp_path):
    def train(steps, **resume):
        args = SFTConfig(
            output_dir=str(tmp_path), record_answers=2, eval_strategy="steps", eval_steps=2, max_steps=steps,
            save_strategy="steps", save_steps=2, per_device_train_batch_size=2, report_to="none", use_cpu=True,
            eos_token="</s>", disable_tqdm=True, lr_scheduler_type="constant",
        )  # fmt: skip
        rows = [{"prompt": f"the bird {n} ", "completion": "flew"} for n in range(8)]
        trainer = ResumableSFTTrainer(
            model=tiny_llama(max_position_embeddings=64),
            args=args,
            train_dataset=Dataset.from_list(rows[4:]),
            eval_dataset=Dataset.from_list(rows[:4]),
            processing_class=tiny_tokenizer(),
            resume_anyway=True,
        )
        trainer.train(**resume)
        return [row["step"] for row in read_jsonl(tmp_path / "completions.rank0.jsonl")]

    assert train(3) == [0, 0, 2, 2, 3, 3]
    assert train(4, resume_from_checkpoint=True) == [0, 0, 2, 2, 3, 3, 4, 4]
    rows = list(read_jsonl(tmp_path / "completions.rank0.jsonl"))
    assert {row["prompt"] for row in rows} == {"the bird 0 ", "the bird 1 "} and all(row["completion"] for row in rows)
    assert "Samples over time" in (tmp_path / "report.html").read_text()


def test_answers_that_cannot_be_recorded_are_refused(tmp_path):
    with pytest.raises(ValueError, match="only|record_run"):
        SFTConfig(output_dir=str(tmp_path), record_answers=2, record_run=False)
    accelerator = SimpleNamespace(unwrap_model=lambda model: model)
    given = {"model": tiny_llama(max_position_embeddings=8), "processing_class": tiny_tokenizer()}
    trainer = SimpleNamespace(**given, accelerator=accelerator)
    with pytest.raises(ValueError, match="leaves no room for an answer in the model's context of 8"):
        AnswersCallback(trainer=trainer, prompts=["the bird " * 20])
    args = SimpleNamespace(record_answers=2)
    handler = SimpleNamespace(callbacks=[ReportCallback(), JSONLCallback()])
    rows = Dataset.from_list([{"text": "a"}])
    with pytest.raises(ValueError, match="the rows have none: give rows with `prompt` or `messages`"):
        record_run(SimpleNamespace(args=args, callback_handler=handler, given_rows=rows))


@pytest.mark.slow
def test_what_is_recorded_is_never_pushed_to_the_hub(tmp_path, monkeypatch):
    """Nor is a credential, in the arguments that a push writes: the token is used, and not pickled."""
    pushed = []

    class Hub:
        def create_repo(self, name, **kwargs):
            return huggingface_hub.RepoUrl(f"https://huggingface.co/{name}")

        def upload_folder(self, folder_path, ignore_patterns, token, **kwargs):
            paths = [str(p.relative_to(folder_path)) for p in Path(folder_path).rglob("*") if p.is_file()]
            assert not any(TOKEN.encode() in (Path(folder_path) / path).read_bytes() for path in paths)
            pushed.append((list(filter_repo_objects(paths, ignore_patterns=ignore_patterns)), token))
            return SimpleNamespace(is_done=lambda: True, done=lambda: True)

    monkeypatch.setattr("transformers.trainer.hf_api", Hub)
    given = {"push_to_hub": True, "hub_model_id": "me/x", "hub_token": TOKEN}
    trainer = PPOTrainer(
        model=tiny_llama(),
        reward_funcs=length_reward,
        args=tiny_config(tmp_path, **given, save_strategy="steps", save_steps=4),
        train_dataset=prompts(),
        processing_class=tiny_tokenizer(),
    )
    record_run(trainer, samples=True)
    trainer.train()
    assert report_of(tmp_path) == f"Report: {tmp_path / '_run' / 'report.html'}"
    trainer.push_to_hub(token=TOKEN)
    assert list(read_jsonl(tmp_path / "_run" / "completions.rank0.jsonl")) and len(pushed) == 2
    for paths, token in pushed:
        assert "model.safetensors" in paths and token == TOKEN
        assert not [path for path in paths if path.endswith((".jsonl", ".html"))]


# ---- Prometheus ----


def samples(text):
    return {name: float(value) for name, value in re.findall(r"^(\S+) (\S+)$", text, re.MULTILINE)}


def test_server_and_textfile(tmp_path):
    callback = PrometheusCallback(port=0, textfile=str(tmp_path / "run.prom"))
    run = Replay(tiny_config(tmp_path), KLBudgetCallback(warn=1, limit=2), callback)
    run.log(1, logs=LOG)
    run.log(2, logs={"objective/kl": 2.5, "loss": None})
    with urllib.request.urlopen(f"http://127.0.0.1:{callback.port}/metrics", timeout=10) as answer:
        served = samples(answer.read().decode())
    assert served["trl_ext_kl"] == 2.5 and served["trl_ext_reward"] == 1.0 and served["trl_ext_step"] == 2
    assert served['trl_ext_log{key="completions/max_length"}'] == 8.0
    assert served['trl_ext_alerts_total{monitor="KLBudgetCallback"}'] == 3  # not 0 at the start, near, over
    assert samples((tmp_path / "run.prom").read_text())["trl_ext_kl"] == 2.5
    run.fire("on_train_end")
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{callback.port}/metrics", timeout=2)


def test_numbers_of_numpy_and_torch_are_numbers(tmp_path):
    path = tmp_path / "run.prom"
    run = Replay(tiny_config(tmp_path), JSONLCallback(), PrometheusCallback(textfile=str(path)))
    run.log(1, logs={"objective/kl": np.float32(0.5), "loss": torch.tensor(2.0), "more": np.int64(3)})
    logged = next(row for row in read_jsonl(tmp_path / "metrics.rank0.jsonl") if row["type"] == "train")
    assert logged["kl"] == 0.5 and logged["loss"] == logged["logs"]["loss"] == 2.0 and logged["logs"]["more"] == 3
    assert samples(path.read_text())["trl_ext_kl"] == 0.5


def test_what_was_never_measured_is_not_exported_and_a_notice_is_no_alert(tmp_path):
    path = tmp_path / "run.prom"
    run = Replay(tiny_config(tmp_path), KLBudgetCallback(), PrometheusCallback(textfile=str(path)))
    for step in range(1, 10):
        run.log(step, logs={"loss": 0.5, "policy/entropy_avg": 0.0})
    assert [what.split(":")[0] for what in run.notices] == ["nothing to watch"] and not run.said
    assert samples(path.read_text()) == {
        "trl_ext_step": 9.0,
        "trl_ext_entropy": 0.0,
        'trl_ext_log{key="learning_rate"}': 1e-4,
        'trl_ext_log{key="loss"}': 0.5,
        'trl_ext_log{key="policy/entropy_avg"}': 0.0,
    }


def test_dashboard_asks_for_exported_names_only(tmp_path):
    callback = PrometheusCallback(textfile=str(tmp_path / "run.prom"))
    run = Replay(tiny_config(tmp_path), KLBudgetCallback(), callback)
    run.log(1, logs=LOG | {"objective/kl": 99.0})
    exported = {name.split("{")[0] for name in samples((tmp_path / "run.prom").read_text())}
    dashboard = json.loads((Path(trl_ext.callbacks.__file__).parent / "grafana.json").read_text())
    asked = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"trl_ext_\w+", target["expr"])
    }
    assert asked <= exported and {f"trl_ext_{name}" for name in GAUGES} <= asked
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_prometheus_arguments(subtests):
    for kwargs, message in [({}, "needs `port=` or `textfile=`"), ({"textfile": "x.txt"}, "end in .prom")]:
        with subtests.test(kwargs=kwargs), pytest.raises(ValueError, match=message):
            PrometheusCallback(**kwargs)


def test_a_port_that_is_taken_ends_nothing(tmp_path):
    first, second = PrometheusCallback(port=0), PrometheusCallback(port=0)
    run = Replay(tiny_config(tmp_path), first)
    second.port = first.port
    other = Replay(tiny_config(tmp_path), second)
    other.log(1, logs=LOG)
    run.fire("on_train_end")


# ---- The picture ----


def test_picture_is_drawn_every_so_many_steps_and_at_the_end(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("trl_ext.callbacks.plot.plot_monitoring", lambda *args: drawn.append(len(args[0])))
    run = Replay(tiny_config(tmp_path), MonitoringPlotCallback(steps=3))
    for step in range(1, 8):
        run.log(step, logs=LOG)
    run.fire("on_train_end")
    assert drawn == [3, 6, 7]


@pytest.mark.slow
def test_picture_marks_alerts(tmp_path, monkeypatch):
    images = []
    monkeypatch.setattr(wandb, "run", object())
    monkeypatch.setattr(wandb, "Image", str)
    monkeypatch.setattr(wandb, "alert", lambda **kwargs: None, raising=False)
    monkeypatch.setattr(wandb, "log", images.append)
    pictures = []
    for limit in (100.0, 2.0):
        callbacks = (
            KLBudgetCallback(warn=limit, limit=limit, tolerance=99, action="save"),
            MonitoringPlotCallback(steps=99),
        )
        run = Replay(tiny_config(tmp_path, report_to=["wandb"]), *callbacks)
        for step in range(1, 5):
            run.log(step, logs=LOG | {"objective/kl": float(step)})
        run.fire("on_train_end")
        pictures.append(matplotlib.image.imread(tmp_path / "rlhf_monitoring.png"))
    red = [np.isclose(p[..., :3], (0.839, 0.153, 0.157), atol=0.01).all(-1).sum() for p in pictures]
    assert red[1] > red[0] + 100  # the marks
    assert images[-1] == {"rlhf_monitoring": str(tmp_path / "rlhf_monitoring.png")}


def test_picture_of_a_trainer_that_logs_little(tmp_path):
    from trl import SFTConfig

    run = Replay(SFTConfig(str(tmp_path), use_cpu=True, bf16=False), MonitoringPlotCallback())
    run.log(1, entropy=1.0)
    run.fire("on_train_end")
    assert (tmp_path / "rlhf_monitoring.png").stat().st_size > 10_000


@pytest.mark.parametrize(("config", "heights"), [("PPOConfig", [5, 10]), ("GRPOConfig", [[1, 0.5], [2, 1]])])
def test_the_kl_budget_is_drawn_in_the_unit_of_the_curve(config, heights):
    """5 and 10 nats per response; of 5 and 10 tokens they are 1 and 0.5, 2 and 1 nats per token."""
    axes, metrics = Figure().subplots(), METRICS[config]
    history = [{"step": step, metrics["kl"].key: 0.3, "completions/mean_length": 5.0 * step} for step in (1, 2)]
    budget = {"KLBudgetCallback": {"args": {"warn": 5, "limit": 10}}}
    PANELS["KL to the reference, nats"](axes, history, metrics, budget)
    drawn = [np.asarray(line.get_ydata()) for line in axes.lines[1:]]
    np.testing.assert_allclose(drawn, [np.broadcast_to(height, 2) for height in heights])


def test_without_matplotlib_it_is_said_before_training(monkeypatch):
    monkeypatch.setattr("trl_ext.upstream.packages.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="needs matplotlib, which is not installed: `pip install matplotlib`"):
        MonitoringPlotCallback()


# ---- The table ----


def test_table_names_a_unit_and_a_cadence_for_each():
    assert {m.cadence for metrics in METRICS.values() for m in metrics.values()} == {"rollout", "step"}
    assert METRICS["RLOOConfig"]["kl"].unit == "nats per token" != METRICS["PPOConfig"]["kl"].unit
    assert "kl" not in METRICS["KTOConfig"]


def test_subclasses_of_a_config_are_known_and_others_not(tmp_path):
    class Mine(type(tiny_config(tmp_path))):
        pass

    assert metrics_of(Mine(str(tmp_path), use_cpu=True, bf16=False)) is METRICS["PPOConfig"]
    assert metrics_of(object()) == {}


def test_rollout_steps(tmp_path):
    assert rollout_steps(tiny_config(tmp_path)) == 4  # 2 minibatches, passed over twice
    assert rollout_steps(tiny_config(tmp_path, gradient_accumulation_steps=2)) == 4


def test_series_takes_the_last_of_a_step_and_no_nan():
    history = [
        {"step": 2, "a": 9.0},
        {"step": 1, "a": 1},
        {"step": 2, "a": 2.0},
        {"step": 3, "a": math.nan},
        {"step": 4},
    ]
    assert curve(history, "a") == ([1, 2], [1, 2.0]) and curve(history, None) == ([], [])
