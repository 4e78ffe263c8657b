"""Ensembles of reward functions and of reward models."""

import json
import pickle

import pytest
import torch

from tests.rewards.test_model import adapted, saved
from tests.tiny import tiny_gpt2, tiny_llama, tiny_reward_model
from trl_ext.rewards import EnsembleReward, ModelReward, reward_identity

ROWS = ["the cat ", "a dog ran ", "then it was ", "the "]
ANSWERS = ["sat", "flew over the sky", "very happy", "big bird sat"]


class Fixed:
    def __init__(self, name, scores):
        self.__name__, self.scores = name, scores

    def __call__(self, prompts, completions, completion_ids, **kwargs):
        return self.scores


def failing(**kwargs):
    raise OSError("no connection")


A, B, C = Fixed("a", [1.0, 2.0, 6.0, None]), Fixed("b", [3.0, 2.0, 5.0, 9.0]), Fixed("c", [8.0, 2.0, 5.0, 9.0])


def test_rows_with_too_much_disagreement_or_a_missing_score_have_none():
    logged = {}
    reward = EnsembleReward([A, B, C], "min", max_disagreement=2.9)
    assert reward(ROWS, ANSWERS, [[1]] * 4, log_metric=logged.__setitem__) == [None, 2, 5, None]
    # stds √(26/3), 0, √(2/9), and a row without one member's score
    assert logged == {
        "rewards/min_of_a_b_c/disagreement": pytest.approx(((26 / 3) ** 0.5 + (2 / 9) ** 0.5) / 3),
        "rewards/min_of_a_b_c/rejected": 0.25,
    }
    assert EnsembleReward([A, B, C], "min", max_disagreement=3)(ROWS, ANSWERS, [[1]] * 4) == [1, 2, 5, None]
    assert pickle.loads(pickle.dumps(reward))(ROWS, ANSWERS, [[1]] * 4) == [None, 2, 5, None]
    # Means 5.5, 2, 5, 9 and stds 2.5, 0, 0, 0
    assert EnsembleReward([B, C], "uncertainty", uncertainty_coef=2.0)(ROWS, ANSWERS, [[1]] * 4) == [0.5, 2, 5, 9]


def test_a_member_that_fails_is_named_or_leaves_no_score():
    with pytest.raises(RuntimeError, match="reward 'failing': OSError: no connection"):
        EnsembleReward([B, failing])(ROWS, ANSWERS, [[1]] * 4)
    assert EnsembleReward([B, failing], on_error="skip")(ROWS, ANSWERS, [[1]] * 4) == [None] * 4


# ---- Reward models ----


def scores_of(members, **kwargs):
    return [
        (member.function if hasattr(member, "function") else member)(ROWS, ANSWERS, finished=[True, False] * 2)
        for member in members
    ]


@pytest.mark.slow
def test_adapters_of_one_base_share_it_and_score_as_each_does_alone(tmp_path):
    """Also where they adapt different layers: one adapter must not act in another's scores."""
    base = saved(tmp_path / "base", tiny_reward_model(tiny_llama()))
    layers = (["q_proj"], ["q_proj", "v_proj"], ["up_proj"], ["q_proj"])
    paths = [adapted(tmp_path / f"m{i}", base, i, target_modules=names) for i, names in enumerate(layers)]
    paths.append(saved(tmp_path / "whole"))
    ensemble = EnsembleReward(paths)
    assert scores_of(ensemble.members) == [
        pytest.approx(scores, abs=1e-5) for scores in scores_of(map(ModelReward, paths))
    ]

    def weights(models):
        return {p.data_ptr(): p.numel() for model in models for p in model.parameters()}

    models = [member.function.model for member in ensemble.members]
    own = [sum(weights([model]).values()) for model in (ModelReward(base).model, models[-1])]
    adapters = sum(p.numel() for name, p in models[0].named_parameters() if ".member_" in name or ".default" in name)
    assert sum(weights(models).values()) == own[0] + adapters + own[1]  # one base for four
    assert len({member.function.identity for member in ensemble.members}) == 5
    assert (
        reward_identity(ensemble)
        == reward_identity(EnsembleReward(paths))
        != reward_identity(EnsembleReward(paths[1:]))
    )  # though one has been called, and so moved to its device


def test_the_folder_of_an_ensemble_names_its_members_and_their_scales(tmp_path):
    for i in range(2):
        saved(tmp_path / f"member-{i}", tiny_reward_model(tiny_gpt2(), seed=i))
    facts = [{"folder": "member-0", "mean": 1.0, "std": 2.0}, {"folder": "member-1", "mean": -1.0, "std": 0.5}]
    (tmp_path / "ensemble.json").write_text(json.dumps({"members": facts}))
    ensemble = EnsembleReward(str(tmp_path), normalize=True, model_kwargs={"batch_size": 1})
    a, b = torch.tensor(scores_of(ensemble.members))
    expected = ((a - 1) / 2 + (b + 1) / 0.5) / 2
    assert ensemble(ROWS, ANSWERS, finished=[True, False] * 2) == pytest.approx(expected.tolist(), abs=1e-6)
    assert ensemble.__name__ == f"mean_of_{tmp_path.name}"
