"""What a run records and exports: JSON lines, completions, the page, Prometheus and the plot."""

import json
import math
import re
import urllib.request
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from datasets import Dataset
from huggingface_hub.utils import filter_repo_objects
from transformers import TrainerState

import trl_ext.callbacks
from tests.callbacks.replay import Replay, ppo as ppo_trainer
from tests.dpo.worker import config, pairs
from tests.tiny import ON_CPU, length_reward, prompts, tiny_config, tiny_llama, tiny_tokenizer
from trl_ext import DPOTrainer
from trl_ext.callbacks import (
    JSONLCallback,
    KLBudgetCallback,
    MonitoringPlotCallback,
    PrometheusCallback,
    SamplesCallback,
    record_run,
)
from trl_ext.dpo import ResumableSFTTrainer, SFTConfig
from trl_ext.runs.files import read_jsonl
from trl_ext.workbench import report_of

TOKEN = "hf_" + "aB3dE5gH7jK9mN1pQ3sT5vX7zA9cE1gH3j"
RECORD = {"metrics.rank0.jsonl", "report.html"}
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


ppo = partial(ppo_trainer, record_run=True)


def dpo(folder, record_run=True):
    args = config(folder, max_steps=2, record_run=record_run)
    return DPOTrainer(model=tiny_llama(), args=args, train_dataset=pairs(), processing_class=tiny_tokenizer())


def left_in(folder):
    return {path.name for path in folder.glob("*") if path.suffix in (".jsonl", ".html")}


def events_of(folder):
    return list(read_jsonl(folder / "metrics.rank0.jsonl"))


# ---- JSONL ----


def test_events(tmp_path):
    recorder = JSONLCallback()
    run = Replay(tiny_config(tmp_path), KLBudgetCallback(), recorder)
    run.log(1, logs=LOG)
    run.log(2, logs={"loss": math.nan, "num_tokens": 300.0})
    run.evaluate(2, {"eval_objective/scores": 1.5})
    run.fire("on_save")
    run.fire("on_log", logs={"train_runtime": 3.0})
    events = events_of(tmp_path)
    kinds = [("begin", 0), ("train", 1), ("train", 2), ("eval", 2), ("save", 2), ("end", 2)]
    assert [(e["type"], e["step"]) for e in events] == kinds
    assert events[0]["config"]["learning_rate"] == 1e-3 and events[0]["config_class"] == "PPOConfig"
    assert len(events[0]["run"]) == 12
    first, second = events[1:3]
    assert (first["kl"], first["loss"], first["loss/value_avg"]) == (2.0, 0.5, 4.0)
    assert (first["seconds_generation"], first["seconds_scoring"]) == (0.5, 0.25)
    # What cannot be measured is absent: at the first log no time has passed, and there is no GPU here
    assert not {"tokens_per_sec_per_gpu", "seconds_update", "vram_allocated_bytes"} & set(first)
    assert second["tokens_per_sec_per_gpu"] > 0 and second["loss"] == "nan" and "kl" not in second
    assert first["monitors"]["KLBudgetCallback"]["limit"] == 10.0 and "monitors" not in second
    assert all(e["rank"] == 0 and e["timestamp"] > 1e9 for e in events)
    Replay(tiny_config(tmp_path), KLBudgetCallback(), recorder).log(1, logs=LOG)  # another run with the same callback
    assert "monitors" in (again := events_of(tmp_path)[-1]) and "tokens_per_sec_per_gpu" not in again


def test_a_resumed_run_keeps_its_id(tmp_path):
    first = Replay(tiny_config(tmp_path), JSONLCallback())
    first.state.save_to_json(str(tmp_path / "state.json"))
    for state in (TrainerState.load_from_json(str(tmp_path / "state.json")), TrainerState()):
        Replay(tiny_config(tmp_path), JSONLCallback(), state=state)
    first, resumed, other = (event["run"] for event in events_of(tmp_path))
    assert first == resumed != other


# ---- Completions and the page ----


@pytest.mark.slow
@pytest.mark.parametrize(("make", "completions"), [(ppo, {"completions.rank0.jsonl"}), (dpo, set())])
def test_recording_is_on_by_default_and_changes_no_weight(make, completions, tmp_path):
    weights = []
    for is_recorded in (True, False):
        torch.manual_seed(0)
        trainer = make(tmp_path / str(is_recorded), record_run=is_recorded)
        if is_recorded:  # the script's own recorder
            trainer.add_callback(JSONLCallback())
            record_run(trainer)
        trainer.train()
        weights.append(torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()]))
    assert left_in(tmp_path / "True") == RECORD | completions and not left_in(tmp_path / "False")
    kinds = [event["type"] for event in events_of(tmp_path / "True")]
    assert kinds.count("begin") == 1 and kinds.count("train") == trainer.state.max_steps
    assert torch.equal(*weights)


@pytest.mark.slow
def test_samples_are_a_few_of_each_rollout_and_of_no_evaluation(tmp_path):
    def second(completions, **kwargs):
        return [None] + [2.0] * (len(completions) - 1)

    evaluated = {"eval_dataset": Dataset.from_dict({"prompt": ["big big big"] * 4}), "eval_steps": 1}
    rewards = [length_reward, second]
    trainer = ppo(tmp_path, rewards=rewards, max_steps=8, eval_strategy="steps", **evaluated)
    trainer.add_callback(SamplesCallback(trainer=trainer, per_rollout=3))
    trainer.train()
    rows = list(read_jsonl(tmp_path / "completions.rank0.jsonl"))
    assert [row["step"] for row in rows] == [0] * 3 + [4] * 3  # two rollouts of four steps
    assert all(row["scores"]["length_reward"] == len(row["completion"].split()) for row in rows)
    assert [row["scores"]["second"] for row in rows] == [None, 2.0, 2.0] * 2
    assert {row["prompt"] for row in rows} <= set(prompts()["prompt"])


@pytest.mark.slow
def test_sft_generates_before_during_and_after_training(tmp_path):
    def train(steps, **resume):
        settings = {"record_answers": 2, "save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps"}
        config = SFTConfig(str(tmp_path), **ON_CPU | settings, eval_steps=2, max_steps=steps, eos_token="</s>")
        rows = [{"prompt": f"the bird {n} ", "completion": "flew"} for n in range(8)]
        trained, held_out = (Dataset.from_list(part) for part in (rows[4:], rows[:4]))
        data = {"train_dataset": trained, "eval_dataset": held_out, "processing_class": tiny_tokenizer()}
        model = tiny_llama(max_position_embeddings=64)
        trainer = ResumableSFTTrainer(model, args=config, **data)
        trainer.train(**resume)
        return [row["step"] for row in read_jsonl(tmp_path / "completions.rank0.jsonl")]

    assert train(3) == [0, 0, 2, 2, 3, 3]
    assert train(4, resume_from_checkpoint=True) == [0, 0, 2, 2, 3, 3, 4, 4]
    rows = list(read_jsonl(tmp_path / "completions.rank0.jsonl"))
    assert {row["prompt"] for row in rows} == {"the bird 0 ", "the bird 1 "} and all(row["completion"] for row in rows)
    assert "Samples over time" in (tmp_path / "report.html").read_text()


@pytest.mark.slow
def test_records_are_not_pushed_to_the_hub(tmp_path, monkeypatch):
    """Neither is a credential: a push uses the token, but the arguments that it writes do not have it."""
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
    trainer = ppo(tmp_path, **given, save_strategy="steps", save_steps=4)
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


def test_a_textfile_and_a_plot_that_cannot_be_written_warn_once(tmp_path, caplog):
    args = tiny_config(tmp_path / "no")  # no such folder
    run = Replay(args, PrometheusCallback(textfile=f"{args.output_dir}/run.prom"), MonitoringPlotCallback(steps=1))
    for step in (1, 2, 3):
        run.log(step, logs=LOG)
    assert caplog.text.count("PrometheusCallback could not") == caplog.text.count("monitoring.png` could not") == 1


def test_server_textfile_and_dashboard(tmp_path):
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
    dashboard = json.loads((Path(trl_ext.callbacks.__file__).parent / "grafana.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked = {name for query in queries for name in re.findall(r"trl_ext_\w+", query)}
    assert len(asked) > 10 and asked <= {name.split("{")[0] for name in served}
    run.fire("on_train_end")
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{callback.port}/metrics", timeout=2)
