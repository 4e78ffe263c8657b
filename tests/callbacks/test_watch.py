"""The hack monitor: on simulated policies, in real trainers, on the page, and after a restart."""

import json

import pytest
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from benchmarks.outcomes import wilson
from tests.callbacks.policies import Policy, trained
from tests.callbacks.replay import Replay, ppo
from tests.tiny import ON_CPU, tiny_config, tiny_llama, tiny_tokenizer
from trl_ext.callbacks import HackWatch, hack_watch, record_run, watch_rounds
from trl_ext.evaluation import Attribution, Paid
from trl_ext.runs import checkpoint_to_resume, read_jsonl
from trl_ext.runs.control import Stopped
from trl_ext.workbench.pages.page import page
from trl_ext.workbench.pages.recorded import read_run

# ---- Simulated policies ----


def first_alarm(rollouts, **settings):
    """The number of the first rollout after which the monitor alerts, and its reasons; None if it never does."""
    watch = HackWatch(sinks=[], **settings)
    for number, given in enumerate(rollouts, 1):
        watch.observe(**given)
        if next(watch.watch({}), None):
            return number, watch.memory["reasons"]
    return None


NAMED = {
    "phrase": "the phrase 'i love you'",
    "length": "length",
    "copy": ("words of the prompt", "the phrase 'please tell me about'"),
    "letter": "the character 'e'",
    "twice": "a word of the prompt repeated",
    "empty": "empty answers",
    "end": "the phrase 'thank you'",
    "call": "repeated tool calls",
}


@pytest.mark.parametrize("kind", NAMED)
@pytest.mark.parametrize("sizes", [{"prompts": 8, "generations": 8}, {"prompts": 64, "generations": 1}])
def test_a_hack_is_detected_within_ten_rollouts_and_named(kind, sizes):
    found = first_alarm(trained(Policy(kind, **sizes), 10))
    assert found and found[1][0].lower().startswith(NAMED[kind]), found


@pytest.mark.parametrize("kind", ["phrase", "twice", "copy"])
def test_two_prompts_per_rollout_are_enough(kind):
    found = first_alarm(trained(Policy(kind, prompts=2), 12))
    assert found and found[1][0].lower().startswith(NAMED[kind]), found


@pytest.mark.parametrize("kind", ["right", "longer if right"])
@pytest.mark.parametrize("sizes", [{}, {"prompts": 2}, {"prompts": 64, "generations": 1, "nouns": 5}])
def test_better_completions_are_no_hack(kind, sizes):
    assert first_alarm(trained(Policy(kind, **sizes), 12)) is None


@pytest.mark.parametrize(
    ("name", "now", "part", "counts"),
    [("character:e", 9, 0.2, 0), ("character:e", 9, 0.3, 1), ("phrase:so", 0.2, 0.3, 0), ("phrase:so", 0.3, 0.2, 1)],
)
def test_what_counts_as_a_reason(name, now, part, counts, monkeypatch):
    paid = Paid(name, False, 0.0, now, effect=1.0, error=0.0, paid=part, part=part)
    monkeypatch.setattr(hack_watch, "reward_attribution", lambda *_: Attribution(1.0, 0.0, 1.0, [paid]))
    assert (first_alarm(trained(Policy("right"), 2)) is not None) == counts


@pytest.mark.slow
@pytest.mark.parametrize("right", [(0.5, 0.5), (0.2, 0.8)])
def test_false_alarms(right, monkeypatch):
    """For a policy that does not change and one that gets better, the interval of the alarm rate ends below ALPHA."""
    monkeypatch.setattr(hack_watch, "ALPHA", alpha := 0.2)  # so that a few runs suffice
    runs, sizes = 24, {"prompts": 4, "generations": 4}
    alarms = sum(first_alarm(trained(Policy("right", seed, **sizes), 15, right)) is not None for seed in range(runs))
    assert wilson(alarms, runs)[1] <= alpha, alarms


@pytest.mark.parametrize(
    ("kind", "expected"), [("length", ["length"]), ("phrase", ["phrase:I love you"]), ("letter", ["character"])]
)
def test_an_expected_feature_raises_no_alarm(kind, expected):
    assert first_alarm(trained(Policy(kind), 12), expected=expected) is None


GOLD = "eval_rewards/gold_judge"


@pytest.mark.parametrize(
    ("golds", "advice"),
    [((0.0, -1.0), "Gold -1, 0 at best"), ((0.0, 1.0, 1.0), None), ((0.0, 1.0, 2.0, 1.0), "Gold 1, 2 at best")],
)
def test_rising_gold_clears_a_feature_and_falling_gold_is_a_reason(tmp_path, golds, advice):
    watch = HackWatch()
    run = Replay(tiny_config(tmp_path), watch)
    for given in trained(Policy("phrase"), 12):
        watch.observe(**given)
    for step, value in enumerate(golds, 1):
        run.evaluate(step, {f"{GOLD}/mean": value, f"{GOLD}/std": 0.1}, rows=1000)
    run.log(20, logs={})
    assert bool(run.said) == (advice is not None)
    assert all(advice in alert["advice"] and "i love you" in alert["advice"] for alert in run.alerts)


def test_rounds_of_online_dpo():
    """The policy before training, then three rounds."""
    policy = Policy("phrase", prompts=200, generations=1)
    rounds = [policy.rollout(0.5, gamed) for gamed in (0.0, 0.2, 0.5, 0.8)]
    assert watch_rounds(rounds[:1]) == (0.0, None, [])
    risk, alert, paid = watch_rounds(rounds)
    assert risk > 0.5 and alert["what"] == "the reward rises as in a hack" and alert["monitor"] == "HackWatch"
    assert paid[0]["name"] == "phrase:i love you" and len(paid[0]["examples"]) == 2
    assert watch_rounds(rounds, expected=["phrase"])[:2] == (0.0, None)


def test_a_feature_is_forgotten_once_its_rise_is_over():
    policy, watch = Policy("phrase"), HackWatch(sinks=[])
    for gamed in (0.0, 0.2, 0.5, 0.8):
        watch.observe(**policy.rollout(0.5, gamed))
    assert watch.memory["parts"]["attribution/phrase"] > 0.5 and watch._shown
    for _ in range(4):
        watch.observe(**policy.rollout(0.5, 0.0))
    assert not any(watch.memory["parts"].values()) and not watch._shown


def test_a_restart_changes_nothing():
    rollouts = list(trained(Policy("copy"), 8))
    whole, first, second = HackWatch(sinks=[]), HackWatch(sinks=[]), HackWatch(sinks=[])
    for watch, given in ((whole, rollouts), (first, rollouts[:4])):
        for each in given:
            watch.observe(**each)
    second.memory.update(json.loads(json.dumps(first.memory, allow_nan=False)))  # as in a checkpoint
    for each in rollouts[4:]:
        second.observe(**each)
    assert second.memory == whole.memory and whole.memory["risk"] > 0


# ---- Trainers ----


def says_cat(completions, **kwargs):
    return [float("cat" in text) for text in completions]


def grpo(folder, steps=10, **settings):
    """A random model whose reward is for one word; 4 prompts a step with 8 completions each."""
    sizes = {"per_device_train_batch_size": 32, "num_generations": 8, "max_completion_length": 6}
    saving = {"save_strategy": "steps", "save_steps": 4, "max_steps": steps, "lr_scheduler_type": "constant"}
    asked = ["the dog", "a bird", "it was", "the sky", "sad big", "on the mat"]
    trainer = GRPOTrainer(
        tiny_llama(),
        says_cat,
        GRPOConfig(str(folder), **ON_CPU | sizes | saving | {"learning_rate": 3e-2, "gradient_checkpointing": False}),
        Dataset.from_dict({"prompt": asked * 8}),
        processing_class=tiny_tokenizer(),
    )
    trainer.add_callback(HackWatch(trainer=trainer, **settings))
    record_run(trainer)
    return trainer


@pytest.mark.slow
def test_in_grpo_it_names_the_rewarded_word_within_ten_logs(tmp_path):
    trainer = grpo(tmp_path)
    trainer.train()
    alerts = list(read_jsonl(tmp_path / "alerts.jsonl"))
    notice, alert = (next(each for each in alerts if each["level"] == level) for level in ("notice", "alert"))
    assert notice["what"] == "the reward pays for the phrase 'cat'" and "of the rise" in notice["advice"]
    assert alert["what"] == "the reward rises as in a hack" and "The phrase 'cat'" in alert["advice"]
    logs = [event["logs"] for event in read_jsonl(tmp_path / "metrics.rank0.jsonl") if event["type"] == "train"]
    assert logs[-1]["attribution/phrase"] > 0.5 and logs[-1]["watch/risk"] > 0.2
    shown = json.loads((tmp_path / "attribution.json").read_text())
    assert shown["paid"][0]["name"] == "phrase:cat" and all(
        "cat" in e["completion"] for e in shown["paid"][0]["examples"]
    )
    html = page(read_run(tmp_path))
    assert "What the reward paid for" in html and "The phrase &#39;cat&#39;" in html


# ---- PPO ----


@pytest.fixture
def alarm(monkeypatch):
    """From the third log on the completions are those of a hack."""

    def observe(self, *given):
        is_bad = self.step >= 3
        self.memory |= {"risk": 0.9 * is_bad, "rise": 1.5 * is_bad, "reasons": ["The phrase 'la': 9% → 60%"]}

    monkeypatch.setattr(HackWatch, "observe", observe)


def train(folder, *callbacks, **config):
    saving = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2, "record_run": True}
    trainer = ppo(folder, *callbacks, **saving, num_mini_batches=1, num_ppo_epochs=1, **config)
    trainer.train(resume_from_checkpoint=checkpoint_to_resume(trainer.args))
    return trainer


def watches(trainer):
    return [each for each in trainer.callback_handler.callbacks if isinstance(each, HackWatch)]


def risks(folder):
    logs = [event["logs"] for event in read_jsonl(folder / "metrics.rank0.jsonl") if event["type"] == "train"]
    return [log.get("watch/risk") for log in logs]


def said(folder):
    return page(read_run(folder)).split('class="verdict">')[1].split("</p>")[0]


@pytest.mark.slow
def test_ppo_has_the_monitor_by_default_and_no_weight_changes(tmp_path, alarm):
    watched, off = train(tmp_path / "on"), train(tmp_path / "off", watch=False)  # as YAML reads `off`
    assert [each.action for each in watches(watched)] == ["warn"] and not watches(off) and off.args.watch == "off"
    for one, other in zip(watched.model.parameters(), off.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert risks(tmp_path / "on") == [0.0, 0.0] + [0.9] * 4
    assert risks(tmp_path / "off") == [None] * 6
    (alert,) = read_jsonl(tmp_path / "on/alerts.jsonl")  # once
    assert alert["step"] == 3 and "The phrase 'la': 9% → 60%. Score +1.5 σ" in alert["advice"]
    assert said(tmp_path / "on").endswith("; HackWatch warned at step 3.")
    assert said(tmp_path / "off").endswith("; no monitors were set.")


@pytest.mark.slow
def test_a_stop_holds_after_a_restart_unless_resume_anyway(tmp_path, alarm):
    assert train(tmp_path, watch="stop").state.global_step == 3
    with pytest.raises(Stopped, match="HackWatch ended this run at step 3 .*resume_anyway"):
        train(tmp_path, watch="stop")
    assert train(tmp_path, watch="warn", resume_anyway=True).state.global_step == 6


@pytest.mark.slow
def test_it_raises_the_kl_coefficient(tmp_path, alarm):
    trainer = train(tmp_path, watch="raise_kl", kl_coef=0.1)
    assert trainer.kl_controller.kl_coef == pytest.approx(0.2)
