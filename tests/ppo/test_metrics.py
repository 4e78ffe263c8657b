"""Each metric equals a slow float64 reference: sums over real tokens ÷ their count, never a mean of means."""

import contextlib
import copy
import functools

import numpy as np
import pytest
import torch

from tests.ppo.worker import RESUMED
from tests.tiny import prompts, tiny_gpt2, tiny_ppo, weights
from trl_ext import PPOTrainer

EOS, TEMPERATURE, KL_COEF, GAMMA, LAM, VALUE_CLIP = 2, 0.9, 0.1, 0.97, 0.9, 0.1
CLIP, HIGHER, DUAL = 0.05, 0.08, 1.1  # the clip range below and above 1, and the dual clip

KEYS = """
objective/kl objective/kl_std policy/entropy_std loss/value_std completions/std_length
objective/kl_per_token objective/scores objective/scores_std objective/rlhf_reward
objective/non_score_reward objective/entropy objective/kl_coef objective/num_unscored policy/approxkl_avg
policy/clipfrac_avg policy/entropy_avg loss/policy_avg loss/value_avg val/clipfrac_avg val/ratio val/ratio_var
val/explained_variance val/num_eos_tokens episode eps completions/mean_length completions/min_length
completions/max_length completions/clipped_ratio completions/mean_terminated_length tokens_per_second time/generate
time/logprobs time/score time/update grad_norm/policy grad_norm/critic num_tokens loss learning_rate grad_norm
"""


def policy():
    model = tiny_gpt2()
    model.transformer.wte.weight.data[EOS] *= 3  # so that lengths differ
    return model


def reward(completions, completion_ids, **kwargs):
    """None for one row in three."""
    return [None if sum(ids) % 3 == 1 else float(sum(ids) % 5) for ids in completion_ids]


def per_token(policy, critic, prompt, completion):
    """The log-probs, entropies and values of one row alone, without padding."""
    ids = torch.tensor([[*prompt, *completion]])
    logits = policy(ids).logits[0].double() / TEMPERATURE
    hidden = critic.base_model(ids).last_hidden_state
    values = critic.score(hidden)[0, :, 0].double()
    rows = []
    for t, token in enumerate(completion):
        logprobs = logits[len(prompt) + t - 1].log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum()
        rows.append((logprobs[token].item(), entropy.item(), values[len(prompt) + t - 1].item()))
    return [np.array(column) for column in zip(*rows, strict=True)]


class Reference(PPOTrainer):
    """Recomputes the inputs of the metrics from the plain models."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.plain_reference = tiny_gpt2().eval()
        self.rollouts, self.batches = [], []

    def plain_models(self):
        policy, critic = tiny_gpt2().eval(), copy.deepcopy(self.model.critic).eval()
        policy.load_state_dict(self.model.policy.state_dict())
        return policy, critic

    def rows_of(self, batch):
        for i in range(len(batch["prompt_ids"])):
            yield (
                i,
                batch["prompt_ids"][i][batch["prompt_mask"][i].bool()].tolist(),
                batch["completion_ids"][i][batch["completion_mask"][i].bool()].tolist(),
            )

    @torch.no_grad()
    def _generate_and_score_completions(self, inputs):
        rollout = super()._generate_and_score_completions(inputs)
        if not self.model.training:
            return rollout
        policy, critic = self.plain_models()
        recorded = []
        for _, prompt, completion in self.rows_of(rollout):
            logprobs, _, values = per_token(policy, critic, prompt, completion)
            ref_logprobs, _, _ = per_token(self.plain_reference, critic, prompt, completion)
            score = reward(None, [completion])[0]
            rewards = -KL_COEF * (logprobs - ref_logprobs)
            advantages = np.zeros(len(completion))
            if score is not None:
                rewards[-1] += score
                for t in reversed(range(len(completion))):
                    last = t + 1 == len(completion)
                    delta = rewards[t] + (0 if last else GAMMA * values[t + 1]) - values[t]
                    advantages[t] = delta + (0 if last else GAMMA * LAM * advantages[t + 1])
            recorded.append(
                {
                    "completion": completion,
                    "kl": logprobs - ref_logprobs,
                    "logprobs": logprobs,
                    "score": score,
                    "reward": rewards.sum(),
                    "advantages": advantages,
                    "values": values,
                }
            )
        self.rollouts.append(recorded)
        return rollout

    def _compute_loss(self, model, inputs):
        policy, critic = self.plain_models()
        with torch.no_grad():
            for i, prompt, completion in self.rows_of(inputs):
                if not inputs["loss_mask"][i].any():
                    continue
                logprobs, entropies, values = per_token(policy, critic, prompt, completion)
                n = len(completion)
                old = {
                    k: inputs[k][i, :n].double().numpy()
                    for k in ("old_logprobs", "old_values", "advantages", "returns")
                }
                self.batches.append((logprobs, entropies, values, old))
        return super()._compute_loss(model, inputs)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Three rollouts of two minibatches of two micro-batches, two PPO epochs; log windows of 8 and 4 steps."""
    model = policy()
    trainer = tiny_ppo(
        tmp_path_factory.mktemp("run"),
        model,
        reward,
        Reference,
        train_dataset=prompts(24),
        per_device_train_batch_size=3,
        gradient_accumulation_steps=2,
        max_steps=12,
        logging_steps=8,
        temperature=TEMPERATURE,
        kl_coef=KL_COEF,
        gamma=GAMMA,
        lam=LAM,
        baseline="critic",  # as in `Reference`
        cliprange=CLIP,
        epsilon_high=HIGHER,
        dual_clip=DUAL,
        cliprange_value=VALUE_CLIP,
        max_completion_length=7,
        learning_rate=5e-3,
        lr_scheduler_type="constant",
        local_rollout_forward_batch_size=5,
    )
    trainer.plain_reference.load_state_dict(model.state_dict())
    trainer.train()
    return trainer


@pytest.fixture(params=[0, 1], ids=["steps 1 to 8, two rollouts", "steps 9 to 12, one rollout"])
def window(run, request):
    """The logs, rollouts and training rows of a log window."""
    log = [row for row in run.state.log_history if "objective/kl" in row]  # the second window ends with the training
    rollouts = [run.rollouts[:2], run.rollouts[2:]][request.param]
    n_first = sum(2 * sum(row["score"] is not None for row in rollout) for rollout in run.rollouts[:2])
    batches = [run.batches[:n_first], run.batches[n_first:]][request.param]
    return log[request.param], [row for rollout in rollouts for row in rollout], batches, len(rollouts)


@pytest.mark.slow
def test_rollout_metrics(window):
    log, rows, _, n_rollouts = window
    scored = [row for row in rows if row["score"] is not None]
    assert 0 < len(scored) < len(rows) and len({len(row["completion"]) for row in rows}) > 2
    ended = [row["completion"][-1] == EOS for row in rows]
    lengths = [len(row["completion"]) for row in rows]
    scores = np.array([row["score"] for row in scored])
    values, advantages = (np.concatenate([row[name] for row in scored]) for name in ("values", "advantages"))
    returns = values + advantages
    expected = {
        "objective/kl": np.mean([row["kl"].sum() for row in scored]),
        "objective/kl_per_token": np.concatenate([row["kl"] for row in scored]).mean(),
        "objective/scores": scores.mean(),
        "objective/scores_std": scores.std(ddof=1),
        "objective/rlhf_reward": np.mean([row["reward"] for row in scored]),
        "objective/non_score_reward": np.mean([-KL_COEF * row["kl"].sum() for row in scored]),
        "objective/entropy": np.mean([-row["logprobs"].sum() for row in scored]),
        "objective/kl_coef": KL_COEF,
        "objective/num_unscored": (len(rows) - len(scored)) / n_rollouts,
        "val/explained_variance": 1 - (returns - values).var() / returns.var(),
        "val/num_eos_tokens": sum(ended) / n_rollouts,
        "completions/mean_length": np.mean(lengths),
        "completions/min_length": min(lengths),
        "completions/max_length": max(lengths),
        "completions/mean_terminated_length": np.mean([n for n, end in zip(lengths, ended, strict=True) if end]),
        "completions/clipped_ratio": 1 - np.mean(ended),
        "rewards/reward/mean": scores.mean(),
        "rewards/reward/std": scores.std(ddof=1),
    }
    for name, value in expected.items():
        assert log[name] == pytest.approx(value, rel=1e-4, abs=2e-5), name


def test_training_metrics(window):
    log, _, batches, _ = window
    columns = {name: [] for name in ("ratio", "kl", "entropy", "clipped", "dual", "policy", "value", "value_clipped")}
    for logprobs, entropies, values, old in batches:
        log_ratio = logprobs - old["old_logprobs"]
        ratio, advantages = np.exp(log_ratio), old["advantages"]
        plain, clipped = -ratio * advantages, -np.clip(ratio, 1 - CLIP, 1 + HIGHER) * advantages
        low, high = old["old_values"] - VALUE_CLIP, old["old_values"] + VALUE_CLIP
        error = 0.5 * (values - old["returns"]) ** 2
        clipped_error = 0.5 * (np.clip(values, low, high) - old["returns"]) ** 2
        columns["ratio"].append(ratio)
        columns["kl"].append(0.5 * log_ratio**2)
        columns["entropy"].append(entropies)
        columns["clipped"].append(clipped > plain)
        columns["policy"].append(
            np.minimum(np.maximum(plain, clipped), np.where(advantages < 0, -DUAL * advantages, np.inf))
        )
        columns["dual"].append((advantages < 0) & (ratio > DUAL))
        columns["value"].append(np.maximum(error, clipped_error))
        columns["value_clipped"].append(clipped_error > error)
    tokens = {name: np.concatenate(column) for name, column in columns.items()}
    assert all(tokens[name].any() for name in ("clipped", "dual", "value_clipped"))
    one_token = 1.5 / len(tokens["ratio"])  # a ratio at the very edge may fall on either side
    expected = {
        "policy/approxkl_avg": (tokens["kl"].mean(), 1e-5),
        "policy/clipfrac_avg": (tokens["clipped"].mean(), one_token),
        "policy/entropy_avg": (tokens["entropy"].mean(), 1e-4),
        "loss/policy_avg": (tokens["policy"].mean(), 1e-4),
        "loss/value_avg": (tokens["value"].mean(), 1e-4),
        "val/clipfrac_avg": (tokens["value_clipped"].mean(), one_token),
        "val/ratio": (tokens["ratio"].mean(), 1e-4),
        "val/ratio_var": (tokens["ratio"].var(ddof=1), 1e-4),
    }
    for name, (value, tolerance) in expected.items():
        assert log[name] == pytest.approx(value, abs=tolerance), name


def test_counters(run, window):
    log, rows, _, n_rollouts = window
    assert log["episode"] == {2: 24, 1: 36}[n_rollouts]
    assert log["tokens_per_second"] > 0
    seconds = sum(log[f"time/{phase}"] for phase in ("generate", "logprobs", "score", "update"))
    n_tokens = sum(len(row["completion"]) for row in rows)
    assert log["tokens_per_second"] == pytest.approx(n_tokens / seconds)
    assert 0 < seconds < run.state.log_history[-1]["train_runtime"]


def test_each_documented_metric_is_logged(run):
    log = next(row for row in run.state.log_history if "objective/kl" in row)
    assert not set(KEYS.split()) - log.keys()
    # the metrics of GRPO's baseline and KL are absent
    assert not {"kl", "reward", "reward_std", "frac_reward_zero_std"} & log.keys()
    assert all(isinstance(value, (int, float)) and np.isfinite(value) for value in log.values())


def test_steps_of_a_window_are_weighted_by_tokens(tmp_path):
    """A run logged once, at the end, has the token-weighted means of the run logged at each step."""
    logs = []
    for logging_steps in (1, 4):
        # The reward gives None for some rows, so minibatches differ in size
        trainer = tiny_ppo(tmp_path / str(logging_steps), policy(), reward, logging_steps=logging_steps)
        tokens, record = [], trainer.metrics.add_update

        def counted(*args, tokens=tokens, record=record):
            tokens.append(args[-1]["loss_mask"].sum().item())
            record(*args)

        trainer.metrics.add_update = counted
        trainer.train()
        logs.append([row for row in trainer.state.log_history if "policy/approxkl_avg" in row])
    assert (len(logs[0]), len(logs[1])) == (4, 1) and len(set(tokens)) > 1
    for name in ("policy/approxkl_avg", "policy/entropy_avg", "loss/value_avg", "val/ratio"):
        assert logs[1][0][name] == pytest.approx(np.average([row[name] for row in logs[0]], weights=tokens), rel=1e-5)


class NoMetrics:
    """Metrics that observe and report nothing."""

    def timed(self, phase):
        return contextlib.nullcontext()

    untimed = functools.partialmethod(timed, "")

    def report(self, *_):
        return {}

    means = report

    def __getattr__(self, name):
        return self  # `train.add` and the like

    def __call__(self, *args, **kwargs):
        return None


@pytest.mark.slow
def test_metrics_only_observe(tmp_path):
    """Without them a run has the same weights, KL coefficients and reward moments."""
    config = RESUMED | {"num_ppo_epochs": 2, "missing_eos_penalty": 0.5, "eval_strategy": "steps", "eval_steps": 5}
    ends = []
    for observed in (True, False):
        trainer = tiny_ppo(tmp_path / str(observed), eval_dataset=prompts(4), **config)
        if not observed:
            trainer.metrics = NoMetrics()
        trainer.train()
        ends.append((weights(trainer), trainer.kl_controller.state_dict(), trainer.reward_normalizer.state_dict()))
    assert ends[0][1]["kl_coef"] != 0.05
    torch.testing.assert_close(ends[1], ends[0], rtol=0, atol=0)
