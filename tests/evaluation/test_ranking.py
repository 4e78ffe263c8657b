import itertools

import pytest
import torch

from trl_ext.evaluation import best_of_n_credit, rank_correlation, ranking_report, rankings_of_pairs


def test_rank_correlations_by_hand():
    # Scores order the answers 1, 3, 2, 4: of six pairs one is the other way round, and Σd² = 2
    found = rank_correlation(torch.tensor([4.0, 2.0, 3.0, 1.0]), torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert found == pytest.approx((1 - 6 * 2 / (4 * 15), (5 - 1) / 6))


def test_rank_correlations_with_ties_by_their_signs():
    # With s_ij = sign(x_i − x_j): τ-b is the correlation of all s_ij, ρ that of their sums over j (Kendall, 1945)
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        scores, ranks = torch.randint(0, 4, (2, 7), generator=generator).double()
        ours, theirs = ((x[:, None] - x).sign() for x in (scores, -ranks))
        rho, tau = (
            ((a * b).sum() / ((a * a).sum() * (b * b).sum()).sqrt()).item()
            for a, b in ((ours.sum(1), theirs.sum(1)), (ours, theirs))
        )
        assert rank_correlation(scores, ranks) == pytest.approx((rho, tau))


def test_what_says_nothing_is_left_out_and_a_reward_that_says_nothing_is_0():
    some, same = torch.tensor([3.0, 2.0, 1.0]), torch.ones(3)
    assert rank_correlation(some, same) is None and rank_correlation(same, some) == (0, 0)
    report = ranking_report([[3.0, 2.0], [1.0, 2.0]], [[1, 2], [1, 1]])
    assert report["prompts"] == report["all_tied"] == 1
    assert (report["spearman"], report["kendall"]) == pytest.approx((1, 1))
    assert ranking_report([[1.0, 2.0]], [[1, 1]]) is None


def test_ties_at_the_top_are_split():
    assert [best_of_n_credit(1.0, others) for others in ([0, 0], [1, 0], [1, 1], [2, 1])] == [1, 1 / 2, 1 / 3, 0]


def test_pairs_of_a_ranking_give_it_back_and_others_do_not():
    order = list("dacb")
    pairs = [*itertools.combinations(order, 2)]
    for left_out in [None, *pairs]:
        given = [pair for pair in pairs if pair != left_out] + [("x", "y")] * 2
        names = ["p"] * (len(given) - 2) + ["q", "q"]
        found = rankings_of_pairs(names, [a for a, _ in given], [b for _, b in given])
        if left_out:
            assert found == []
        else:
            ((name, answers, ranks),) = found
            assert name == "p" and [a for _, a in sorted(zip(ranks, answers, strict=True))] == order
    circle = [("a", "b"), ("b", "c"), ("c", "a")]
    both_ways = [("a", "b"), ("b", "a"), ("a", "c")]
    for wrong in (circle, both_ways):
        assert rankings_of_pairs(["p"] * 3, [a for a, _ in wrong], [b for _, b in wrong]) == []
