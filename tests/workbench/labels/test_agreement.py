"""Labels of several annotators: reading them, their agreement, and the pairs that are made from them."""

import itertools
import math

import krippendorff
import numpy as np
import pytest
from datasets import Dataset, concatenate_datasets
from sklearn.metrics import cohen_kappa_score

from tests.workbench.labels.planted import planted
from trl_ext.workbench.labels import (
    Columns,
    agreement_report,
    krippendorff_alpha,
    majority_pairs,
    noisy_bradley_terry,
    read_labels,
    tables as labels,
    zscores,
)

CHOICES = {"ann": "aabbttaab", "bob": "aabatabab", "cy": "abbbttabt"}
WIDE = Columns(annotators=tuple(CHOICES), values=("a", "b", "t"))


def wide():
    size = len(CHOICES["ann"])
    texts = {
        "prompt": [f"p{i // 2}" for i in range(size)],
        "response_a": [f"a{i}" for i in range(size)],
        "response_b": [f"b{i}" for i in range(size)],
    }
    return Dataset.from_dict(texts | {name: list(values) for name, values in CHOICES.items()})


def long(rows):
    """Rows of (item, annotator, choice)."""
    each = [
        {"prompt": f"p{i}", "response_a": f"a{i}", "response_b": f"b{i}", "annotator": who, "choice": choice}
        for i, who, choice in rows
    ]
    return Dataset.from_list(each)


def test_a_long_table_in_any_order_equals_the_wide_one(monkeypatch):
    monkeypatch.setattr(labels, "_ROWS", 3)  # read in parts
    rows = [(i, who, {"t": "tie"}.get(c, c)) for who, given in CHOICES.items() for i, c in enumerate(given)]
    table = long([rows[i] for i in np.random.default_rng(0).permutation(len(rows))])
    read, read_wide = read_labels(table), read_labels(wide(), WIDE)
    got, expected = agreement_report(read), agreement_report(read_wide)
    for name in ("labels", "items", "ties", "alpha", "agreement"):
        assert got[name] == pytest.approx(expected[name]), name
    assert len(got["kappas"]) == 3
    for row in got["kappas"]:
        a, b = row["annotators"]
        assert row["kappa"] == pytest.approx(cohen_kappa_score([*CHOICES[a]], [*CHOICES[b]]))
    chosen = {pair["chosen"] for pair in majority_pairs(table, read)}
    assert chosen == {pair["chosen"] for pair in majority_pairs(wide(), read_wide, WIDE)} and len(chosen) == 7


def test_alpha_and_its_interval_are_those_of_a_slow_bootstrap():
    generator = np.random.default_rng(0)
    quality = generator.dirichlet([1, 1, 0.3], size=80)
    counts = np.array([generator.multinomial(generator.integers(1, 5), p) for p in quality])
    alpha, (low, high) = krippendorff_alpha(counts, resamples=2000)
    matrix = [[label for label, n in enumerate(row) for _ in range(n)] for row in counts]
    cells = np.full((4, len(matrix)), np.nan)
    for item, given in enumerate(matrix):
        cells[: len(given), item] = given
    assert alpha == pytest.approx(krippendorff.alpha(cells, level_of_measurement="nominal"))
    pairable = cells[:, (~np.isnan(cells)).sum(0) > 1]
    draws = generator.integers(0, pairable.shape[1], (200, pairable.shape[1]))
    slow = [krippendorff.alpha(pairable[:, drawn], level_of_measurement="nominal") for drawn in draws]
    assert [low, high] == pytest.approx(np.percentile(slow, [2.5, 97.5]), abs=0.03)


def test_agreement_by_hand():
    # Item 0: a a b; item 1: a t; item 2: b alone
    table = long([(0, "x", "a"), (0, "y", "a"), (0, "z", "b"), (1, "x", "a"), (1, "y", "tie"), (2, "x", "b")])
    report = agreement_report(read_labels(table))
    assert report["agreement"] == pytest.approx(1 / 4)  # of the pairs xy, xz, yz in item 0, and xy in item 1
    people = {row["annotator"]: row for row in report["annotators"]}
    assert people["x"]["agreement"] == pytest.approx((1 / 2 + 0) / 2) and people["x"]["compared"] == 2
    assert people["z"]["agreement"] == 0 and people["x"]["shown_first"] == pytest.approx(2 / 3)


def test_position_bias_is_measured_against_the_other_order():
    rows = [("x", "a0", "b0", "a"), ("y", "b0", "a0", "a"), ("z", "b0", "a0", "b"), ("t", "a0", "b0", "tie")]
    each = [dict(zip(("annotator", "response_a", "response_b", "choice"), row, strict=True)) for row in rows]
    report = agreement_report(read_labels(Dataset.from_list([row | {"prompt": "p"} for row in each])))
    # x and z took a0, which y was shown second; y took b0, which x was shown second and z first; ties do not count
    leans = {row["annotator"]: row["lean"] for row in report["annotators"]}
    assert leans == pytest.approx({"x": 1 / 2, "y": 1, "z": -1 / 2, "t": None})


def test_bad_annotators_are_found_and_good_ones_are_not():
    table, kinds, _ = planted(200, seed=1)
    read = read_labels(table)
    z = dict(zip(read.annotators, zscores(read), strict=True))
    assert {name for name, score in z.items() if score < -3} == {n for n, kind in kinds.items() if kind != "good"}
    people = {row["annotator"]: row for row in agreement_report(read)["annotators"]}
    leaning = {name for name, row in people.items() if abs(row["lean_z"]) > 4}
    assert leaning == {name for name, kind in kinds.items() if kind == "lazy"}
    assert people["annotator 1"]["lean"] == pytest.approx(0.5, abs=0.1)


def test_pairs_by_hand():
    votes = ["aaa", "aab", "att", "abt", "bbb", "aa", "b"]
    table = long([(i, "xyz"[j], {"t": "tie"}.get(c, c)) for i, given in enumerate(votes) for j, c in enumerate(given)])
    table = table.map(lambda row: {"response_b": row["response_a"]} if row["prompt"] == "p5" else {})
    left_out = {}
    made = list(majority_pairs(table, read_labels(table), left_out=left_out, min_labels=2))
    assert [(pair["chosen"], pair["rejected"]) for pair in made] == [("a0", "b0"), ("a1", "b1"), ("b4", "a4")]
    assert [pair["confidence"] for pair in made] == pytest.approx([1, 2 / 3, 1])
    assert [pair["weight"] for pair in made] == pytest.approx([9 / 7, 3 / 7, 9 / 7])  # 1, ⅓, 1 over their mean
    assert [pair["votes"] for pair in made] == [3, 3, 3] and made[1]["annotators"] == ["x", "y", "z"]
    assert [*left_out.values()] == [1, 1, 1]  # abt, att, b; the item with one text twice does not count


def test_repeated_labels_count_once_and_contradictions_do_not_count():
    rows = [(0, "x", "a"), (0, "x", "a"), (1, "x", "a"), (1, "x", "b"), (1, "y", "b"), (0, "y", "a"), (0, " ", "a")]
    read = read_labels(long([*rows, (1, "z", None)]))
    assert (len(read), read.repeats, read.contradictions, read.missing) == (3, 2, 1, 2)
    assert read.counts().tolist() == [[2, 0, 0], [0, 1, 0]]


def test_an_unknown_choice_is_refused():
    with pytest.raises(ValueError, match="the column 'choice' holds 'b' in row 1, not one of 1, 2"):
        read_labels(long([(0, "x", "1"), (1, "x", "b")]), Columns(values=("1", "2")))
    with pytest.raises(ValueError, match=f"the column '{WIDE.annotators[0]}' holds"):
        read_labels(wide(), Columns(annotators=WIDE.annotators, values=("1", "2")))


# ---- Rankings ----


def test_a_ranking_equals_its_pairs(monkeypatch):
    """Each row is an answer's rank, 1 is the best; some ranks are equal, and some answers have none."""
    monkeypatch.setattr(labels, "_ROWS", 7)
    rng, votes = np.random.default_rng(0), {}
    rows = [
        {"prompt": f"p{p}", "answer": f"a{a} of {p}", "annotator": who, "rank": a + int(rng.integers(1, 4))}
        for p in range(12)
        for who in CHOICES
        for a in range(4)
        if rng.random() < 0.8
    ]
    for _, ranked in itertools.groupby(rows, lambda row: (row["prompt"], row["annotator"])):
        for a, b in itertools.combinations(ranked, 2):
            winner = "tie" if a["rank"] == b["rank"] else min(a, b, key=lambda row: row["rank"])["answer"]
            votes.setdefault(frozenset([a["answer"], b["answer"]]), []).append(winner)
    assert "tie" in itertools.chain(*votes.values())
    table = Dataset.from_list([rows[i] for i in rng.permutation(len(rows))])
    columns = Columns(responses=("answer",), scores=("rank",), lowest_wins=True)
    read = read_labels(table, columns)
    report = agreement_report(read)
    pairs = [a == b for each in votes.values() for a, b in itertools.combinations(each, 2)]
    assert report["agreement"] == pytest.approx(np.mean(pairs)) and report["items"] == len(votes)
    assert report["labels"] == sum(map(len, votes.values()))
    made = {(pair["chosen"], pair["rejected"]): pair["confidence"] for pair in majority_pairs(table, read, columns)}
    for pair, confidence in made.items():
        assert confidence == pytest.approx(votes[frozenset(pair)].count(pair[0]) / len(votes[frozenset(pair)]))
    assert len(made) == sum(
        max(each.count(w) for w in {*each} - {"tie"} or {0}) / len(each) > 0.6 for each in votes.values()
    )


def test_repeated_labels_of_a_prompt_do_not_narrow_an_interval():
    """The same labels three times, as pairs of the same prompts, change no interval and no z-score."""
    table, _, _ = planted(20, seed=6)
    again = [
        table.map(lambda row, n=n: {f"response_{c}": row[f"response_{c}"] + n for c in "ab"}) for n in ("", " 2", " 3")
    ]
    once, thrice = (agreement_report(read_labels(each)) for each in (table, concatenate_datasets(again)))
    assert thrice["labels"] == 3 * once["labels"]
    assert thrice["alpha_interval"] == pytest.approx(once["alpha_interval"], abs=2e-3)
    for name in ("z", "lean_z"):
        values = [{row["annotator"]: row[name] for row in report["annotators"]} for report in (once, thrice)]
        assert values[1] == pytest.approx(values[0]), name


# ---- Noisy Bradley-Terry ----


def test_scores_and_reliabilities_are_the_mode_of_the_papers_posterior():
    rng = np.random.default_rng(0)
    answers = np.array([rng.permutation(5)[:2] for _ in range(40)])
    wins, who = rng.integers(0, 3, 40) / 2, rng.integers(0, 3, 40)
    scores, eta = noisy_bradley_terry(answers, wins, who, 5)

    def loss(scores, eta):
        value = sum(s**2 for s in scores) / 2 - sum(7 * math.log(e) + math.log(1 - e) for e in eta)
        for (i, j), win, k in zip(answers, wins, who, strict=True):
            i_beats_j = math.exp(scores[i]) / (math.exp(scores[i]) + math.exp(scores[j]))
            prefers_i = eta[k] * i_beats_j + (1 - eta[k]) * (1 - i_beats_j)
            value -= win * math.log(prefers_i) + (1 - win) * math.log(1 - prefers_i)
        return value

    x, steps = np.r_[scores, eta], np.eye(8) * 1e-3
    slopes = [(loss(*np.split(x + h, [5])) - loss(*np.split(x - h, [5]))) / 2e-3 for h in steps]
    np.testing.assert_allclose(slopes, 0, atol=1e-3)
    assert all(loss(*np.split(x + h, [5])) > loss(scores, eta) for h in [*steps * 10, *steps * -10])
