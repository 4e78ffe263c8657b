"""Two gloo processes train as one with the same global batch, and end together where one fails."""

import re

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.agents import counts, played_by
from tests.launch import on_two_processes
from tests.ppo.agent_worker import TOGETHER, make as make_agent
from tests.ppo.test_critic_pretraining import stepped
from tests.ppo.worker import (
    BY_ONE,
    CORRECTED,
    LORA_PARITY,
    RESUMED,
    assert_gradients_of_separate_models,
    evaluation,
    parity,
)
from tests.rounding import bound
from tests.tiny import BUILDERS, CHECKPOINTING, skewed, tiny_config, tiny_ppo
from trl_ext.runs.checkpoints import checkpoint_to_resume
from trl_ext.runs.saving import MARKER

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture(scope="module")
def launches(tmp_path_factory):
    """Launch four modules at once; return the folder of each and the results of each process."""
    of = {name: tmp_path_factory.mktemp(name) for name in ("ppo", "agents", "critic", "vllm")}
    tiny_ppo(of["ppo"] / "by one", **BY_ONE).train()
    results = on_two_processes(
        ("tests.ppo.worker", of["ppo"], "distributed"),
        ("tests.ppo.agent_worker", of["agents"], "distributed"),
        ("tests.ppo.test_critic_pretraining", of["critic"]),
        ("tests.ppo.vllm_worker", of["vllm"]),
    )
    return {name: (of[name], each) for name, each in zip(of, results, strict=True)}


@pytest.fixture
def launch(launches):
    return launches["ppo"]


@pytest.fixture
def results(launch):
    return launch[1]


def assert_equal(actual, expected):
    assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def differ(a, b, prefix=""):
    return [name for name in a if name.startswith(prefix) and not torch.equal(a[name], b[name])]


RUNS = {
    "parity": {},
    "generations": {"num_generations": 2},
    "lora": LORA_PARITY,
    "corrected": {**CORRECTED, "answering": skewed},
    "turns": {"gae_level": "turn"},
    "mean": {"baseline": "mean", "num_generations": 2},
}


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_take_the_optimizer_steps_of_one(name, results, tmp_path):
    one, split = parity(tmp_path / "one", 1, **RUNS[name]), parity(tmp_path / "split", 1, parts=2, **RUNS[name])
    assert one["processes"] == 1 and one["wrapper"] == "ActorCritic"
    for two in (process[name] for process in results):
        assert two["processes"] == 2 and two["wrapper"] == "DistributedDataParallel"
        assert_close(two["weights"], one["weights"], **bound(one["weights"], split["weights"]))
        assert_close(two["reward_normalizer"], one["reward_normalizer"], rtol=1e-12, atol=1e-12)
        assert_close(two["baseline_gate"], one["baseline_gate"], rtol=1e-4, atol=1e-12)
        assert two["episodes"] == one["episodes"] == 16
    first, second = results[0][name], results[1][name]
    for what in ("weights", "optimizer", "kl_controller", "reward_normalizer", "baseline_gate"):
        assert_equal(first[what], second[what])
    assert first["kl_controller"]["kl_coef"] != 0.05


def test_a_reward_in_the_background_changes_nothing(results):
    for process in results:
        assert_equal(process["background"]["weights"], process["parity"]["weights"])


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_gradients_on_one_base_are_those_of_separate_models(name, checkpointing, results):
    processes = [process["gradients"][name, checkpointing] for process in results]
    assert_gradients_of_separate_models(name, *processes)


@pytest.mark.parametrize("name", ["parity", "corrected"])
def test_two_processes_log_the_metrics_of_one(name, results, tmp_path):
    one = parity(tmp_path, 1, **RUNS[name])["logs"]
    two = results[0][name]["logs"]
    assert len(two) == len(one) == 5
    for actual, expected in zip(two, one, strict=True):
        assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    # Rows were masked out, completions ended by EOS, and the second epoch was off-policy
    assert one[0]["objective/num_unscored"] > 0 and one[0]["val/num_eos_tokens"] > 0
    assert one[1]["policy/approxkl_avg"] > 1e-5 and one[2]["objective/kl"] != 0
    assert (0 < one[0].get("sampling/clipfrac", 0) < 1) == (name == "corrected")


def test_missing_sampler_logprobs_on_one_process_end_both(results):
    for process in results:
        error, message, seconds = process["sampler is silent"]
        assert error == "RuntimeError" and seconds < 60
        assert "log-probs are missing" in message


@pytest.mark.parametrize("size", [1, 2, 4])
def test_evaluation_counts_each_prompt_once(size, results, tmp_path):
    expected = evaluation(tmp_path, size)
    assert_close(evaluation(tmp_path, 5), expected, rtol=1e-5, atol=1e-5)
    actual = results[0]["evaluation"][(1, 2, 4).index(size)]
    assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_evaluation_counts_each_generation_once(results, tmp_path):
    expected = evaluation(tmp_path, 2, num_generations_eval=2)
    assert_close(results[0]["evaluation, 2 generations"], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "mistake"),
    [
        ("reward raises", "KeyError: 'no such row'"),
        ("background raises", "KeyError: 'no such row'"),
        ("reward is NaN", "returned nan for completion 0"),
    ],
)
def test_a_reward_function_that_fails_on_one_process_ends_both(name, mistake, results):
    for process in results:
        error, message, seconds = process[name]
        assert error == "RuntimeError" and seconds < 60
        assert "At step 0, process 1: reward function 'reward'" in message and mistake in message
        assert "process 0" not in message


def test_a_gradient_that_is_not_finite_on_one_process_ends_both(launch):
    folder, results = launch
    for process in results:
        (error, message, seconds), weights = process["not finite"]
        assert error == "FloatingPointError" and seconds < 60
        assert "at step 2" in message and "loss/policy_avg" in message
    last_good = folder / "not finite" / "last-good"
    policy = AutoModelForCausalLM.from_pretrained(last_good)
    critic = AutoModelForSequenceClassification.from_pretrained(last_good / "critic")
    for role, model in (("policy", policy), ("critic", critic)):
        for name, parameter in model.named_parameters():
            assert_close(parameter.data, weights[f"{role}.{name}"], rtol=0, atol=0)


def test_a_checkpoint_that_one_process_cannot_write_ends_both(launch):
    folder, results = launch
    ends = [process["unsaved, stop"] for process in results]
    (error, message, _), step = ends[0]
    assert error == "NotSaved" and message == ends[1][0][1] and step == ends[1][1] <= 4
    assert f"checkpoint-2 could not be written to {folder / 'stop'}" in message
    assert [path.parent.name for path in folder.glob(f"stop/checkpoint-*/{MARKER}")] == ["checkpoint-1"]
    for process in results:
        (error, _, _), step = process["unsaved, continue"]
        assert error is None and step == 4
    complete = {path.parent.name for path in folder.glob(f"continue/checkpoint-*/{MARKER}")}
    assert (
        complete == {"checkpoint-1", "checkpoint-3", "checkpoint-4"} == {p.name for p in folder.glob("continue/ch*")}
    )


def test_the_critics_warm_up_does_not_train_the_policy_on_two_processes(results):
    for process in results:
        seen = process["warm-up"]  # two minibatches a rollout; the first rollout trains the critic alone
        for step in range(1, 9):
            moved = differ(seen[step]["weights"], seen[step - 1]["weights"], "policy.")
            assert len(moved) == (sum(name.startswith("policy.") for name in seen[0]["weights"]) if step > 2 else 0)
            moved = differ(seen[step]["weights"], seen[step - 1]["weights"], "critic.")
            assert "critic.score.weight" in moved
        assert [state["kl_coef"] for state in seen[1:3]] == [0.05] * 2 and seen[3]["kl_coef"] != 0.05
    assert_equal(results[0]["warm-up"], results[1]["warm-up"])


def test_resuming_on_two_processes_is_exact(results):
    for process in results:
        uninterrupted, *resumed = process["resumed"]
        assert uninterrupted["logs"][-1]["epoch"] == 1.5
        for end in resumed:
            assert_equal(end, uninterrupted)
    assert_equal(results[0]["resumed"][0]["weights"], results[1]["resumed"][0]["weights"])


BY_ANOTHER = "checkpoint-{} cannot be resumed with processes: {} → {}"


def test_a_checkpoint_of_one_process_is_refused_on_two(results):
    for process in results:
        error, said, seconds = process["by another"]
        assert error == "CannotResume" and re.search(BY_ANOTHER.format(2, 1, 2), said) and seconds < 60


def test_a_checkpoint_of_two_processes_is_refused_on_one(launch):
    trainer = tiny_ppo(launch[0] / "saved", **RESUMED | {"max_steps": 12})
    with pytest.raises(ValueError, match=BY_ANOTHER.format(12, 2, 1)):
        trainer.train(True)
    assert trainer.state.global_step == 0


def test_episodes_with_different_numbers_of_turns_on_two_processes(launches, tmp_path):
    """The steps are those of one process, though the rows of one process take more turns."""
    _, (first, second) = launches["agents"]
    ends = []
    for parts in (1, 2):
        sizes = {"per_device_train_batch_size": 8 // parts, "gradient_accumulation_steps": parts}
        alone = make_agent(tmp_path / str(parts), **TOGETHER | sizes)
        played_by(alone, counts).train()
        ends.append(alone.model.state_dict())
    assert_close(first["weights"], second["weights"], rtol=0, atol=0)
    expected, logs = alone.state.log_history, first["logs"]
    for name in ("objective/scores", "tools/call_frequency", "completions/mean_length", "val/num_eos_tokens"):
        assert logs[0][name] == expected[0][name], name
    assert_close(first["weights"], ends[0], **bound(*ends))
    for process in (first, second):
        assert_close(process["resumed"], process["whole"], rtol=0, atol=0)
        assert process["evaluated"]["eval_objective/scores"] == 0.4  # five rows, though the last batch is not full


def test_two_processes_pretrain_a_critic_as_one(launches, tmp_path):
    """Steps, logs, the evaluation of an odd number of rows, and scores that the processes share."""
    whole = stepped(tmp_path, 16, 1)
    for steps, scores in launches["critic"][1]:
        assert_close(steps, whole, rtol=1e-4, atol=1e-6)
        assert scores == [[float(i)] for i in range(5)]


def test_two_processes_end_with_a_checkpoint_if_their_vllm_server_dies(launches):
    """Only process 0 calls the server; both gather the weights, and an adapter is unmerged on each."""
    folder, both = launches["vllm"]
    assert both[0]["processes"] == 2
    assert_close(both[1]["stays"], both[0]["stays"], rtol=0, atol=0)
    assert all("failed: " in said["away"] and "resumes from" in said["away"] for said in both)
    assert checkpoint_to_resume(tiny_config(folder / "away"))
