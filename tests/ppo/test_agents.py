"""PPO with tools and environments: which tokens are the policy's, and mistakes of policies, tools and environments."""

import itertools
import json
import pickle
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from torch.testing import assert_close
from trl import GRPOConfig, GRPOTrainer

from tests.agents import Counter, SteppedCounter, byte_tokenizer, call, counts, played_by
from tests.ppo.agent_worker import Kept, make as make_worker
from tests.tiny import ON_CPU, collected, tiny_llama, tiny_ppo
from trl_ext.functional import gae, turn_gae, turn_starts
from trl_ext.ppo.collection import Collection
from trl_ext.ppo.environments import TooSlow, limited
from trl_ext.runs.files import read_jsonl

PROMPT = [{"role": "user", "content": "Count. "}]
IM_END = "<|im_end|>"


def make(tmp_path, player, environment=SteppedCounter, rows=None, tools=None, reward_funcs=None, **config):
    tokenizer = byte_tokenizer()
    rows = rows or [{"prompt": PROMPT, "target": n % 3} for n in range(8)]
    model = tiny_llama(len(tokenizer), max_position_embeddings=2048)
    given = {"train_dataset": Dataset.from_list(rows), "processing_class": tokenizer, "tools": tools, "max_steps": 2}
    given |= {"environment_factory": environment, "max_completion_length": 400, **config}
    return played_by(tiny_ppo(tmp_path, model, reward_funcs, **given), player)


def rolled_out(trainer, rows=8):
    seen = collected(trainer)
    trainer._generate_and_score_completions([trainer.train_dataset[i] for i in range(rows)])
    return seen[-1]


@pytest.mark.slow
def test_only_sampled_tokens_are_the_policys(tmp_path):
    trainer = make(tmp_path, counts)
    rollout = rolled_out(trainer)
    tokenizer = trainer.processing_class
    for row in range(8):
        target = row % 3
        sampled = tokenizer.decode(rollout.completion_ids[row][rollout.mask[row].bool()])
        assert sampled == call("add", number=1) * target + "Done." + IM_END
        said = tokenizer.decode(rollout.completion_ids[row][(rollout.completion_mask[row] - rollout.mask[row]).bool()])
        assert said.count("The sum is") == target and "tool_call" not in said
        assert rollout.lengths[row] == len(tokenizer(sampled)["input_ids"]) and rollout.finished[row]
        ends = [
            t for t in range(400) if rollout.mask[row, t : t + 1].any() and not rollout.mask[row, t + 1 : t + 2].any()
        ]
        # a reward of 1 for each step, at the end of its turn
        assert rollout.token_scores[row].nonzero().flatten().tolist() == ends[:-1]
        assert rollout.scores[row] == target + 1  # and 1 for the end
    assert trainer.reward_func_names == ["SteppedCounter", "SteppedCounter._step_reward"]


def test_rewards_of_steps_alone_are_enough(tmp_path):
    class Steps:
        reset, add, _step_reward = Counter.reset, Counter.add, SteppedCounter._step_reward

    rollout = rolled_out(trainer := make(tmp_path, counts, Steps))
    assert trainer.reward_func_names == ["Steps._step_reward"]
    assert rollout.scores.tolist() == [row % 3 for row in range(8)]


def test_advantages_skip_the_observations(tmp_path):
    """GAE of each row's sampled tokens alone gives the advantages and returns at these tokens."""
    trainer = make(tmp_path, counts, baseline="critic", kl_coef=0.1, gamma=0.95, lam=0.8, normalize_advantages=False)
    rollout = rolled_out(trainer)
    rewards = trainer.token_rewards(rollout, rollout.scores, rollout.k1)
    advantages, returns = trainer.advantages(rollout, rewards, rollout.values)
    for row in range(8):
        mask = rollout.mask[row].bool()
        alone = [x[row][mask][None] for x in (rewards, rollout.values)]
        expected = gae(*alone, torch.ones_like(alone[0]), 0.95, 0.8)
        assert_close(advantages[row][mask], expected[0])
        assert_close(returns[row][mask], expected[0] + alone[1][0])
        assert not advantages[row][~mask].any() and not rewards[row][~mask].any()


@pytest.mark.slow
def test_turns_and_returns_are_logged(tmp_path):
    trainer = make(tmp_path, counts, max_steps=2, rows=[{"prompt": PROMPT, "target": 2}] * 8)
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["turns/mean"] == 3 and log["tools/call_frequency"] == 2 and log["tools/failure_frequency"] == 0
    assert log["environment/SteppedCounter/return"] == log["objective/scores"] == 3
    assert log["completions/mean_length"] == 2 * 48 + 6 and log["completions/mean_tool_length"] == 2 * 37


@pytest.mark.slow
def test_odd_arguments_of_a_tool_call_are_recorded_and_stop_no_run(tmp_path):
    """Arguments of two types under one name, no arguments, and a list: TRL's table and print take only objects."""

    def player(history):
        if "<tool_response>" in history:
            return "Done." + IM_END
        return next(answers)

    a_list = '<tool_call>\n{"name": "add", "arguments": [1]}\n</tool_call>' + IM_END
    answers = itertools.cycle([call("add", number=1), call("add", number="one"), call("add"), a_list])
    trainer = make(tmp_path, player, record_run=True, log_completions=True, max_steps=1)
    trainer.train()
    samples = [row["completion"] for row in read_jsonl(tmp_path / "completions.rank0.jsonl")]
    assert len(samples) == 8 and all(
        [m["role"] for m in each] == ["assistant", "tool", "assistant"] for each in samples
    )
    given = [each[0]["tool_calls"][0]["function"]["arguments"] for each in samples]
    assert all(each in given for each in ({"number": 1}, {"number": "one"}, {}, [1]))
    (table,) = (tmp_path / "completions").glob("*.parquet")
    assert [json.loads(each) for each in Dataset.from_parquet(str(table))["completion"]] == samples


@pytest.mark.slow
def test_a_class_for_grpo_runs_here_unchanged(tmp_path):
    """The same environment, answers and rewards as in TRL's own trainer."""
    logs = []
    for kind in ("PPO", "GRPO"):
        if kind == "PPO":
            trainer = make(tmp_path / kind, counts, Counter)
        else:
            tokenizer = byte_tokenizer()
            trainer = GRPOTrainer(
                model=tiny_llama(len(tokenizer), max_position_embeddings=2048),
                args=GRPOConfig(
                    str(tmp_path / kind),
                    **ON_CPU,
                    per_device_train_batch_size=8,
                    num_generations=2,
                    max_steps=2,
                    max_completion_length=400,
                ),
                train_dataset=Dataset.from_list([{"prompt": PROMPT, "target": n % 3} for n in range(8)]),
                processing_class=tokenizer,
                environment_factory=Counter,
            )
            play = played_by(trainer, counts)._generate_completions
            trainer._generate_single_turn = lambda *args, play=play, **kwargs: play(*args, **kwargs)
        trainer.train()
        logs.append(trainer.state.log_history[0])
    for name in ("rewards/Counter/mean", "tools/failure_frequency"):
        assert logs[0][name] == logs[1][name], name


@pytest.mark.slow
def test_a_truncated_episode_has_not_finished(tmp_path):
    """Without turns or tokens left, the last call has no answer."""
    endless = lambda history: call("add", number=1)  # noqa: E731
    turns = rolled_out(make(tmp_path / "turns", endless, max_tool_calling_iterations=2))
    assert not turns.finished.any() and turns.mask.sum(1).unique().tolist() == [3 * 48]
    tokens = rolled_out(make(tmp_path / "tokens", endless, max_completion_length=120))
    assert not tokens.finished.any() and (tokens.completion_mask.sum(1) <= 120).all()


@pytest.mark.slow
def test_tools_environments_by_name_and_rewards_beside_them(tmp_path):
    class Echo:
        def reset(self, **row):
            return None

        async def shout(self, text: str) -> str:
            """
            Shout.

            Args:
                text: what.

            Returns:
                It, louder.
            """
            return text.upper()

    def double(number: int) -> int:
        """
        Double a number.

        Args:
            number: which.

        Returns:
            Twice the number.
        """
        return 2 * number

    def player(history):
        if "<tool_response>" in history:
            return "Done." + IM_END
        return call("shout", text="a") if '"shout"' in history else call("double", number=4)

    def length(completions, environments, **kwargs):
        return [float(len(messages)) for messages in completions]

    trainer = make(
        tmp_path,
        player,
        {"counter": Counter, "echo": Echo},
        rows=[{"environment": name} for name in ["counter", "echo"] * 4],
        tools=[double],
        reward_funcs=length,
    )
    rollout = rolled_out(trainer)
    assert trainer.reward_func_names == ["length", "Counter"] and rollout.finished.all()
    assert rollout.rewards_per_func[:, 0].tolist() == [3.0] * 8
    assert rollout.rewards_per_func[0, 1] == 0 and rollout.rewards_per_func[1, 1].isnan()
    texts = trainer.processing_class.batch_decode(rollout.completion_ids)
    assert "8\n" in texts[0] and "A\n" in texts[1]
    assert trainer._metrics["train"]["tools/call_frequency"] == [1.0]


@pytest.mark.slow
def test_errors_of_a_tool_are_sent_to_the_model(tmp_path):
    def player(history):
        if "<tool_response>" in history:
            return "Done." + IM_END
        return next(answers)

    class Bad(Counter):
        def hang(self) -> str:
            """
            Hang.

            Returns:
                Nothing.
            """
            time.sleep(30)

        def leave(self) -> str:
            """
            Leave.

            Returns:
                Nothing.
            """
            raise SystemExit(3)

    calls = [
        call("hang"),
        call("leave"),
        call("add", number="three"),
        call("add"),
        call("no_such_tool"),
        call("add", number=1),
    ]
    calls += ['<tool_call>\n{"name": "add", "arguments": {number: 1}}\n</tool_call>' + IM_END, "<tool_call>" + IM_END]
    answers = iter(calls)
    trainer = make(tmp_path, player, Bad, tool_timeout=0.2)
    rollout = rolled_out(trainer)
    texts = trainer.processing_class.batch_decode(rollout.completion_ids)
    told = [
        "took more than 0.2 s",
        "exit(3)",
        "unsupported operand",
        "missing 1 required",
        "not found",
        "The sum is 1.",
    ]
    for text, expected in zip(texts, told, strict=False):
        assert expected in text, text
    assert trainer._metrics["train"]["tools/failure_frequency"] == [pytest.approx(5 / 6)]
    assert rollout.valid.all()


def test_in_a_thread_a_tools_own_timeout_is_not_reported_as_the_limit():
    def refused():
        raise TimeoutError("the socket")

    released = threading.Event()
    with ThreadPoolExecutor(1) as thread:
        with pytest.raises(TimeoutError, match="the socket"):
            thread.submit(limited, refused, 60.0, "the tool").result()
        with pytest.raises(TooSlow, match="the tool took more than 0.01 s"):
            thread.submit(limited, released.wait, 0.01, "the tool", 60).result()
        released.set()


def test_at_turn_level_advantages_are_whitened_over_turns(tmp_path):
    """Each turn counts once in the loss, so the mean is 0 over turns, not over tokens."""
    trainer = make(tmp_path, counts, gae_level="turn", normalize_advantages=True, lam_alpha=0.5)
    rollout = rolled_out(trainer)
    torch.manual_seed(0)
    rewards, values = torch.randn_like(rollout.values), torch.randn_like(rollout.values)
    advantages, _ = trainer.advantages(rollout, rewards, values)
    starts = turn_starts(rollout.mask)
    assert_close(advantages[starts].mean(), torch.tensor(0.0), rtol=0, atol=1e-6)
    assert_close(advantages[starts].var(), torch.tensor(1.0), rtol=1e-4, atol=0)


def test_at_turn_level_a_turn_is_one_action():
    generator = torch.Generator().manual_seed(0)
    rewards, values = (torch.randn(40, 12, generator=generator, dtype=torch.float64) for _ in range(2))
    mask = torch.rand(40, 12, generator=generator) < 0.6
    advantages, firsts = turn_gae(rewards, values, mask, 0.9, 0.7)
    for row in range(40):
        turns, inside = [], False
        for t in range(12):
            if mask[row, t]:
                turns = turns if inside else [*turns, []]
                turns[-1].append(t)
            inside = bool(mask[row, t])
        expected = 0.0
        after = 0.0
        for turn in reversed(turns):
            value = values[row, turn[0]].item()
            expected = rewards[row, turn].sum().item() + 0.9 * after - value + 0.9 * 0.7 * expected
            after = value
            assert_close(advantages[row, turn], torch.full((len(turn),), expected, dtype=torch.float64))
            assert_close(firsts[row, turn], torch.full((len(turn),), value, dtype=torch.float64))
    assert not advantages[~mask].any()


def test_with_sharded_weights_processes_generate_equally_often(tmp_path, monkeypatch):
    """Else the others wait for a `generate` that this process does not call."""
    trainer = make_worker(tmp_path, local_rollout_forward_batch_size=2)
    del trainer._generate_completions  # the policy samples
    generate, sizes = GRPOTrainer._generate_single_turn, []

    def counted(self, prompt_ids, *args):
        sizes.append(len(prompt_ids))
        return generate(self, prompt_ids, *args)

    trainer._collection = Collection([{"prompt": "Tea?", "target": 1}], None, None, most_rows=5)
    trainer._tokens_left = lambda _: 2
    monkeypatch.setattr(GRPOTrainer, "_generate_single_turn", counted)
    prompts = [[9, 10], [9], [11]]
    answers, _ = trainer._generate_completions(prompts, None, {}, 1)
    assert sizes == [2, 1, 1] and len(answers) == 3
    # With vLLM, TRL gives each process as many of the completions as it has prompts
    monkeypatch.setattr(GRPOTrainer, "_generate_single_turn", lambda self, ids, *_: (ids, [[0.0]] * len(ids)))
    trainer.use_vllm, trainer.vllm_mode = True, "server"
    trainer._vllm_server = SimpleNamespace(answered=lambda all: all if len(all[0]) == 5 else 0)
    assert trainer._generate_completions(prompts, None, {}, 1) == (prompts, [[0.0]] * 3)


@pytest.mark.slow
def test_a_killed_and_resumed_run_has_the_same_bits(tmp_path):
    """Also if it is killed in mid-rollout, and with an environment that has a generator of its own."""
    command = [sys.executable, "-m", "tests.ppo.agent_worker", "killed", str(tmp_path)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=240)
    ended = [line for line in done.stdout.splitlines() if line.startswith(("whole ", "killed "))]
    assert ended == ["whole 0", "killed -9", "killed 0"], done.stderr[-3000:]
    ends = [torch.load(tmp_path / name / "end.pt") for name in ("whole", "killed")]
    assert_close(ends[0], ends[1], rtol=0, atol=0)


@pytest.mark.slow
def test_evaluation_does_not_change_the_training_environments(tmp_path):
    ends = []
    for strategy in ("no", "steps"):
        config = {"eval_strategy": strategy, "eval_steps": 1, "save_strategy": "no"}
        trainer = make_worker(tmp_path / strategy, **config, max_steps=3)
        trainer.train()
        ends.append((trainer.model.state_dict(), [each._state_dict() for each in trainer._environment_pool[None]]))
    assert_close(ends[0][0], ends[1][0], rtol=0, atol=0)
    assert ends[0][1] == ends[1][1]
    assert "eval_objective/scores" in trainer.state.log_history[1]


@pytest.mark.slow
def test_a_state_that_cannot_be_saved_is_refused(tmp_path):
    class Odd(Kept):
        def _state_dict(self):
            return {"self": object()}

        def _load_state_dict(self, state):
            pass

    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        make_worker(tmp_path, Odd).train()


def test_a_rollout_function_marks_the_policys_tokens(tmp_path):
    tokenizer = byte_tokenizer()

    def rollout(prompts, trainer):
        ids = [tokenizer("left. A hole. right." + IM_END)["input_ids"] for _ in prompts]
        masks = [[1] * 5 + [0] * 9 + [1] * (len(row) - 14) for row in ids]
        return {
            "prompt_ids": [tokenizer("Walk.")["input_ids"] for _ in prompts],
            "completion_ids": ids,
            "logprobs": [[-5.0] * len(row) for row in ids],
            "env_mask": masks,
            "moves": [2] * len(prompts),
        }

    def reward(moves, **kwargs):
        return [float(number) for number in moves]

    model, rows = tiny_llama(len(tokenizer), max_position_embeddings=256), Dataset.from_list([{"prompt": PROMPT}] * 8)
    given = {"train_dataset": rows, "processing_class": tokenizer, "rollout_func": rollout}
    trainer = tiny_ppo(tmp_path, model, reward, **given)
    rollout = rolled_out(trainer)
    assert tokenizer.decode(rollout.completion_ids[0][rollout.mask[0].bool()]) == "left.right." + IM_END
    assert rollout.scores.tolist() == [2.0] * 8 and (rollout.sampler_logprobs[rollout.mask.bool()] == -5).all()
    assert trainer.args.importance_correction == "token_truncate"  # another engine samples
    trainer.train()
