"""A rollout's parts, without a trainer."""

import math

import torch

from trl_ext.models.decoding import SamplerRecorder
from trl_ext.ppo.evaluation_pass import EvaluationRows
from trl_ext.ppo.rollout import Rollout, joined, permuted

NAN = math.nan


def a_rollout(**changes):
    """Two rows of up to three tokens; the second has no score."""
    fields = {
        "prompt_ids": torch.tensor([[1], [2]]),
        "prompt_mask": torch.ones(2, 1, dtype=torch.long),
        "completion_ids": torch.tensor([[3, 4, 5], [6, 7, 0]]),
        "completion_mask": torch.tensor([[1, 1, 1], [1, 1, 0]]),
        "logprobs": torch.tensor([[-1.0, -2.0, -3.0], [-4.0, -5.0, 0.0]]),
        "ref_logprobs": torch.tensor([[-1.5, -2.0, -2.0], [-4.0, -6.0, 0.0]]),
        "values": torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]]),
        "sampler_logprobs": None,
        "rewards_per_func": torch.tensor([[1.0], [NAN]]),
        "scores": torch.tensor([1.0, NAN]),
        "finished": torch.tensor([True, False]),
        "lengths": torch.tensor([3.0, 2.0]),
    }
    return Rollout(**fields | changes)


def test_micro_batches_are_joined_in_the_order_of_generation():
    rows = a_rollout().rows_for_training(torch.rand(2, 3), torch.rand(2, 3))
    rows = {name: torch.cat([values, values, values]) for name, values in rows.items()}
    rows["row"] = torch.arange(6)
    rows["advantages"] = torch.rand(6, 3)
    order = torch.tensor([3, 1, 5, 0, 2, 4])
    batches = [
        {name: values[order[start : start + 2]] for name, values in rows.items()}
        | {"step_tokens": torch.tensor(9), "token_counts": [(1, 1)] * 2}
        for start in (4, 0, 2)
    ]
    torch.testing.assert_close(joined(batches), rows, rtol=0, atol=0)


def test_minibatches_are_random_by_the_seed_and_sorted_by_length():
    lengths, other = [5, 1, 4, 2, 8, 3, 7, 6], [1] * 8
    order, again = permuted(lengths, 2, seed=3), permuted(other, 2, seed=3)
    assert order == permuted(lengths, 2, seed=3) != permuted(lengths, 2, seed=4) and sorted(order) == [*range(8)]
    for start in (0, 4):
        assert {*order[start : start + 4]} == {*again[start : start + 4]}  # whatever the lengths
        assert [lengths[row] for row in order[start : start + 4]] == sorted(lengths[row] for row in order[start:][:4])


class TwoProcesses:
    num_processes, device = 2, torch.device("cpu")

    def __init__(self, process_index):
        self.process_index = process_index


def test_copies_that_fill_the_last_batch_are_not_real():
    """Five rows on two processes in batches of two: 0 1 | 2 3, then 4 · | · ·"""
    real = []
    for process in (0, 1):
        rows, accelerator = EvaluationRows(5), TwoProcesses(process)
        real.append([rows.next_are_real(2, accelerator).tolist() for _ in range(2)])
    assert real == [[[True, True], [True, False]], [[True, True], [False, False]]]


def test_the_sampler_returns_logprobs_only_of_what_it_sampled():
    recorder, ids = SamplerRecorder(), torch.tensor([[4, 5, 0], [6, 7, 8]])
    logprobs = torch.tensor([[-1.0, -2.0, -9.0], [-3.0, -4.0, -5.0]])

    def sampled_in_two_batches():
        recorder.add(ids[:1, :2], logprobs[:1, :2])
        recorder.add(ids[1:], logprobs[1:])

    sampled_in_two_batches()
    assert recorder.take([[4, 5], [6, 7, 8]]) == [[-1, -2], [-3, -4, -5]]
    assert recorder.take([[4, 5], [6, 7, 8]]) is None  # nothing was sampled since
    sampled_in_two_batches()
    assert recorder.take([[4], [6, 7, 8]]) == [[-1], [-3, -4, -5]]
    sampled_in_two_batches()
    assert recorder.take([[4, 5], [6, 7, 9]]) is None
