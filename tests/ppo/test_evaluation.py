"""`evaluate()` counts each prompt once, and does not change the training state."""

import random
from collections import Counter

import numpy as np
import pytest
import torch

from tests.tiny import length_reward, prompts, tiny_ppo, without_clock


class Spy:
    """Scores a completion by its words plus the length of its prompt, and keeps its inputs."""

    __name__ = "spy"

    def __init__(self):
        self.calls = []

    def __call__(self, prompts, completions, completion_ids, log_metric=None, **kwargs):
        scores = [len(c.split()) + 10.0 * len(p.split()) for p, c in zip(prompts, completions, strict=True)]
        self.calls.append((list(prompts), completion_ids, scores))
        log_metric("my_metric", float(len(self.calls)))
        return scores


def make(tmp_path, reward_funcs=length_reward, eval_dataset=None, **given):
    held_out = eval_dataset or prompts(9, seed=5)
    return tiny_ppo(tmp_path, None, reward_funcs, eval_dataset=held_out, per_device_eval_batch_size=4, **given)


@pytest.mark.parametrize("generations", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_each_prompt_is_scored_once_per_generation(tmp_path, generations):
    """9 prompts in batches of 4: the last batch is not full, so a mean of batch means would differ."""
    spy, dataset = Spy(), prompts(9, seed=5)
    trainer = make(tmp_path, spy, dataset, num_generations_eval=generations)
    metrics = trainer.evaluate()  # before training

    asked = Counter(p for call in spy.calls for p in call[0])
    assert asked == Counter({p: n * generations for p, n in Counter(dataset["prompt"]).items()})
    scores = torch.tensor([score for call in spy.calls for score in call[2]], dtype=torch.float64)
    lengths = torch.tensor([float(len(ids)) for call in spy.calls for ids in call[1]])
    assert metrics["eval_objective/scores"] == pytest.approx(scores.mean().item())
    assert metrics["eval_objective/scores_std"] == pytest.approx(scores.std().item())
    assert metrics["eval_rewards/spy/mean"] == pytest.approx(scores.mean().item())
    assert metrics["eval_completions/mean_length"] == pytest.approx(lengths.mean().item())
    assert metrics["eval_objective/kl"] == pytest.approx(0, abs=1e-5)  # the policy is still the reference
    assert metrics["eval_my_metric"] == pytest.approx(np.mean(range(1, len(spy.calls) + 1)))


def test_an_evaluation_that_raised_does_not_change_the_next(tmp_path):
    """It returns and logs the same as without the failure."""
    fails, dataset = [False], prompts(9, seed=5)

    def reward(prompts, completions, **kwargs):
        if fails[0] and len(completions) == 1:  # the last batch
            raise TimeoutError
        return [1.0 if fails[0] else float(len(c.split())) for c in completions]

    trainer = make(tmp_path, reward, dataset)
    expected = trainer.evaluate()
    fails[0] = True
    with pytest.raises(RuntimeError, match="TimeoutError"):
        trainer.evaluate()
    fails[0] = False
    again = trainer.evaluate()
    assert all(again[name] == expected[name] for name in expected if not name.endswith(("runtime", "per_second")))


def test_unscored_completions_are_counted_over_all_batches(tmp_path):
    def reward(completions, **kwargs):
        return [None, *[1.0] * (len(completions) - 1)]  # 3 batches: 4 + 4 + 1 rows

    metrics = make(tmp_path, reward).evaluate()
    assert metrics["eval_objective/num_unscored"] == 3


def noisy_reward(completions, **kwargs):
    return [len(text.split()) + random.random() + np.random.rand() for text in completions]


@pytest.mark.slow
def test_evaluation_does_not_change_training(tmp_path):
    """With evaluations before the first step and after each, training ends with the same bits."""
    runs = []
    for evaluate in (False, True):
        trainer = make(
            tmp_path / str(evaluate),
            noisy_reward,
            eval_strategy="steps" if evaluate else "no",
            eval_steps=1,
            eval_on_start=evaluate,
            kl_controller="adaptive",
            kl_target=0.01,
            kl_horizon=20,
            reward_normalization="running",
            allow_off_policy_sampling=True,
            top_k=5,
            max_steps=10,  # ends in mid-rollout
            logging_steps=3,
        )
        trainer.train()
        if evaluate:
            assert sum("eval_objective/scores" in row for row in trainer.state.log_history) == 11
            trainer.evaluate()
        runs.append(
            {
                "weights": trainer.model.state_dict(),
                "buffer": trainer._buffered_inputs,
                "moments": trainer.reward_normalizer.running,
                "kl_coef": trainer.kl_controller.kl_coef,
                "counters": (trainer._step, trainer.metrics.episodes, trainer.state.num_input_tokens_seen),
                "torch": torch.get_rng_state(),
                "python": random.getstate(),
                "numpy": torch.tensor(np.random.get_state()[1].astype("int64")),
                "logs": [
                    without_clock(row)
                    for row in trainer.state.log_history
                    if not any(key.startswith("eval") for key in row)
                ],
            }
        )
    assert runs[0]["kl_coef"] != 0.05
    assert runs[0].pop("python") == runs[1].pop("python")
    assert runs[0].pop("logs") == runs[1].pop("logs")
    torch.testing.assert_close(runs[1], runs[0], rtol=0, atol=0)


def test_evaluations_of_the_same_weights_agree(tmp_path):
    """Each evaluation samples with the same seed, so that two checkpoints are compared on the same random numbers."""
    trainer = make(tmp_path)
    first = trainer.evaluate()
    torch.manual_seed(7)  # training uses random numbers, too
    second = trainer.evaluate()
    for key in first:
        if "objective" in key or "completions" in key:
            assert first[key] == second[key]
