"""Scores of single tokens: their positions, normalisation, clipping and the EOS rules."""

import numpy as np
import pytest
import torch

import trl_ext.ppo.trainer as ppo_trainer
from tests.tiny import length_reward, tiny_ppo

EOS = 2
ANSWERS = [[7, 8, 9, EOS], [7, 8, 9], [7, EOS], [8, 9, 7, 8, EOS], [9, 9], [EOS], [7, 8, EOS], [8, 8, 8, EOS]]
FINISHED = [ids[-1] == EOS for ids in ANSWERS]
TOKENS = [[0.5 * i - t for t in range(len(ids))] for i, ids in enumerate(ANSWERS)]  # row 5 gets None below
WHOLE = [1.0, -2.0, 3.0, None, 0.5, None, -1.0, 2.0]
WEIGHTS = [0.5, -2.0, 1.5, 0.0]


def each_token(completion_ids, **kwargs):
    return [None if row == 5 else tokens for row, tokens in enumerate(TOKENS)]


def segments(completion_ids, **kwargs):
    """The first token of a row scores 4, the last 1; every second row gets a float."""
    return [
        None if row == 5 else [4.0, *[0.0] * (len(ids) - 2), 1.0] if len(ids) > 2 else 2.0
        for row, ids in enumerate(completion_ids)
    ]


def whole(prompts, **kwargs):
    return WHOLE


def watching(completion_ids, **kwargs):
    return [np.full(len(ids), 7.0) for ids in completion_ids[:-3]] + [None] * 3


def expected_parts(eos):
    """Each row's score, and the parts of its tokens before the last one; by hand, before normalisation."""
    rows = []
    for row, ids in enumerate(ANSWERS):
        tokens, first = TOKENS[row], [0.0] * len(ids)
        if row == 5:  # without a score
            rows.append(None)
            continue
        marked = len(ids) > 2
        if marked:
            first[0] += 4.0
        score = 0.5 * sum(tokens) - 2.0 * (5.0 if marked else 2.0) + 1.5 * (WHOLE[row] or 0.0)
        parts = [0.5 * own - 2.0 * mark for own, mark in zip(tokens, first, strict=True)][:-1]
        if not FINISHED[row]:
            score, parts = (-2.5, [0.0] * len(parts)) if eos == "missing_eos_score" else (score - 3.0, parts)
        rows.append((score, parts))
    return rows


@pytest.mark.parametrize("kind", ["none", pytest.param("batch", marks=pytest.mark.slow), "group"])
@pytest.mark.parametrize("eos", ["missing_eos_score", "missing_eos_penalty"])
def test_token_scores_are_scaled_and_the_last_token_has_the_rest(tmp_path, token_rewards, kind, eos):
    trainer = tiny_ppo(
        tmp_path,
        None,
        [each_token, segments, whole, watching],
        reward_weights=WEIGHTS,
        kl_coef=0.0,
        baseline="critic",
        reward_normalization=kind,
        reward_group_column="topic" if kind == "group" else None,
        reward_clip_range=[-4.0, 1.2],
        **{eos: -2.5 if eos == "missing_eos_score" else 3.0},
    )
    trainer._generate_single_turn = lambda *_: ([list(ids) for ids in ANSWERS], None)
    topics = trainer.train_dataset["topic"][:8]
    trainer._generate_and_score_completions([trainer.train_dataset[i] for i in range(8)])
    rows, clipped = expected_parts(eos), 0
    for row, ids in enumerate(ANSWERS):
        expected = [0.0] * len(ids)
        if rows[row] is not None:
            score, parts = rows[row]
            peers = [other for other, topic in enumerate(topics) if kind != "group" or topic == topics[row]]
            pool = [rows[other][0] for other in peers if rows[other] is not None]
            deviation = np.std(pool, ddof=1) if len(pool) > 1 else 1.0  # one score has no deviation
            mean, std = (0.0, 1.0) if kind == "none" else (np.mean(pool), deviation)
            shaped = min(max((score - mean) / std, -4.0), 1.2)
            clipped += shaped in (-4.0, 1.2)
            expected = [part / std for part in parts]
            expected += [shaped - sum(expected)]
        actual = token_rewards[0][row]
        torch.testing.assert_close(actual[: len(ids)], torch.tensor(expected).float(), rtol=1e-4, atol=1e-5)
        assert actual[len(ids) :].abs().sum() == 0
    assert clipped or kind != "none"


def spread(completions, completion_ids, **kwargs):
    scores = length_reward(completions)
    return [[score / len(ids)] * len(ids) for score, ids in zip(scores, completion_ids, strict=True)]


@pytest.mark.parametrize(
    ("reward", "settings", "expected"),
    [
        (length_reward, {}, 1.0),
        (spread, {}, 0.95),
        (spread, {"lam": 0.7}, 0.7),
        (length_reward, {"lam": 0.95}, 0.95),
    ],
)
def test_the_default_lambda_depends_on_how_scores_are_given(tmp_path, monkeypatch, reward, settings, expected):
    used, estimate = [], ppo_trainer.advantages_and_returns
    monkeypatch.setattr(
        ppo_trainer, "advantages_and_returns", lambda *args: (used.append(args[4:6]), estimate(*args))[1]
    )
    tiny_ppo(tmp_path, None, reward, max_steps=1, baseline="critic", **settings).train()
    assert used == [(expected, None)]
