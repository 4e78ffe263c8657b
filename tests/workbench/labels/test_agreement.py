"""Labels of several annotators: what is read, how far they agree, and the pairs that come of it."""

import itertools
import json
import math
from dataclasses import replace

import krippendorff
import numpy as np
import pytest
from datasets import Dataset, concatenate_datasets
from sklearn.metrics import cohen_kappa_score

from tests.workbench.labels.planted import COLUMNS, planted, planted_rankings, ranked_outcome
from trl_ext.workbench.labels import (
    Columns,
    agreement_report,
    hold_out_annotators,
    krippendorff_alpha,
    majority_pairs,
    noisy_bradley_terry,
    read_labels,
    shares_of_labels,
    zscores,
)
from trl_ext.workbench.labels import tables as labels
from trl_ext.workbench.labels.bradley_terry import negative_log_posterior
from trl_ext.workbench.labels.outliers import mean_and_error

CHOICES = {"ann": "aabbt aab".replace(" ", ""), "bob": "aabat-bab".replace("-", ""), "cy": "abbbttab"}
WIDE = Columns(annotators=tuple(CHOICES), values=("a", "b", "t"))


def wide(choices=CHOICES):
    size = len(next(iter(choices.values())))
    texts = {
        "prompt": [f"p{i // 2}" for i in range(size)],
        "response_a": [f"a{i}" for i in range(size)],
        "response_b": [f"b{i}" for i in range(size)],
    }
    return Dataset.from_dict(texts | {name: list(values) for name, values in choices.items()})


def long(rows):
    """Rows of (item, annotator, choice)."""
    each = [
        {"prompt": f"p{i}", "response_a": f"a{i}", "response_b": f"b{i}", "annotator": who, "choice": choice}
        for i, who, choice in rows
    ]
    return Dataset.from_list(each)


def turned(rows, seed):
    """A long table of the same labels: rows shuffled, later ones in the other order at times, scores for choices."""
    generator = np.random.default_rng(seed)
    scores = {"a": (2.0, 1.0), "b": (1.0, 2.0), "t": (3.0, 3.0)}
    made, seen = [], set()
    for place in generator.permutation(len(rows) * len(CHOICES)):
        row, who = rows[int(place) // len(CHOICES)], list(CHOICES)[place % len(CHOICES)]
        answers, given = (row["response_a"], row["response_b"]), scores[row[who]]
        # The order of an item's first row is what the labels are named by, in α and κ, too
        step = -1 if row["response_a"] in seen and generator.random() < 0.5 else 1
        seen.add(row["response_a"])
        (left, right), (score_left, score_right) = answers[::step], given[::step]
        prompt = [{"role": "user", "content": row["prompt"]}]
        made.append(
            {"question": prompt, "left": left, "right": right, "who": who}
            | {"score_left": score_left, "score_right": score_right}
        )
    return Dataset.from_list(made)


def test_a_long_table_in_any_order_says_what_the_wide_one_says(monkeypatch):
    monkeypatch.setattr(labels, "_ROWS", 3)  # read in parts
    expected = agreement_report(read_labels(wide(), WIDE))
    columns = Columns(("question",), ("left", "right"), "who", scores=("score_left", "score_right"))
    table = turned(wide(), seed=1)
    got = agreement_report(read_labels(table, columns))
    for name in ("labels", "items", "ties", "alpha", "agreement", "coin", "most_frequent"):
        assert got[name] == pytest.approx(expected[name]), name
    by_pair = [
        {tuple(sorted(row["annotators"])): row["kappa"] for row in report["kappas"]} for report in (got, expected)
    ]
    for (a, b), kappa in by_pair[1].items():
        assert kappa == pytest.approx(cohen_kappa_score([*CHOICES[a]], [*CHOICES[b]]))
    assert by_pair[0] == pytest.approx(by_pair[1]) and len(by_pair[0]) == 3
    for name in ("agreement", "z", "ties"):
        values = [{row["annotator"]: row[name] for row in report["annotators"]} for report in (got, expected)]
        assert values[0] == pytest.approx(values[1]), name
    read = read_labels(table, columns)
    got = {p["chosen"][0]["content"]: p["rejected"][0]["content"] for p in majority_pairs(table, read, columns)}
    assert got == {p["chosen"]: p["rejected"] for p in majority_pairs(wide(), read_labels(wide(), WIDE), WIDE)}
    assert len(got) == 6


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
    draws = generator.integers(0, pairable.shape[1], (500, pairable.shape[1]))
    slow = [krippendorff.alpha(pairable[:, drawn], level_of_measurement="nominal") for drawn in draws]
    assert [low, high] == pytest.approx(np.percentile(slow, [2.5, 97.5]), abs=0.03)


def test_agreement_by_hand():
    # Item 0: a a b; item 1: a t; item 2: b alone
    table = long([(0, "x", "a"), (0, "y", "a"), (0, "z", "b"), (1, "x", "a"), (1, "y", "tie"), (2, "x", "b")])
    report = agreement_report(read_labels(table))
    assert report["agreement"] == pytest.approx(1 / 4)  # of the pairs xy, xz, yz in item 0, and xy in item 1
    assert report["coin"] == pytest.approx((3 * 1 / 2 + 2 * 1 / 4) / 5)
    people = {row["annotator"]: row for row in report["annotators"]}
    assert people["x"]["agreement"] == pytest.approx((1 / 2 + 0) / 2) and people["x"]["compared"] == 2
    assert people["z"]["agreement"] == 0 and people["x"]["shown_first"] == pytest.approx(2 / 3)


def test_lean_is_against_those_who_saw_the_other_order():
    rows = [("x", "a0", "b0", "a"), ("y", "b0", "a0", "a"), ("z", "b0", "a0", "b")]
    each = [dict(zip(("annotator", "response_a", "response_b", "choice"), row, strict=True)) for row in rows]
    report = agreement_report(read_labels(Dataset.from_list([row | {"prompt": "p"} for row in each])))
    # x and z took a0, which y was shown second; y took b0, which x was shown second and z first
    leans = {row["annotator"]: row["lean"] for row in report["annotators"]}
    assert leans == pytest.approx({"x": 1 / 2, "y": 1, "z": -1 / 2})


def test_planted_annotators_are_found_and_good_ones_are_not():
    table, kinds, _ = planted(200, seed=1)
    read = read_labels(table, COLUMNS)
    z = dict(zip(read.annotators, zscores(read), strict=True))
    assert {name for name, score in z.items() if score < -3} == {n for n, kind in kinds.items() if kind != "good"}
    people = {row["annotator"]: row for row in agreement_report(read)["annotators"]}
    leaning = {name for name, row in people.items() if abs(row["lean_z"]) > 4}
    assert leaning == {name for name, kind in kinds.items() if kind == "lazy"}
    assert people["annotator 1"]["seconds"] == 4 and people["annotator 1"]["lean"] == pytest.approx(0.5, abs=0.1)


def test_drift_is_found():
    table, _, better = planted(200, seed=2)
    late = [i for i, row in enumerate(table) if row["annotator"] == "annotator 9" and row["time"] > len(table) / 2]
    choice = table["choice"][:]
    for i in late:  # from now on always wrong
        is_x = table[i]["response_a"].startswith("answer x")
        choice[i] = "b" if is_x == (better[table[i]["item"]] == 0) else "a"
    table = table.remove_columns("choice").add_column("choice", choice)
    rows = agreement_report(read_labels(table, COLUMNS))["annotators"]
    assert [row["annotator"] for row in rows if row["drift_z"] < -3] == ["annotator 9"]


@pytest.mark.parametrize("method", ["dawid_skene", pytest.param("mace", marks=pytest.mark.slow)])
def test_models_of_annotators_make_fewer_wrong_pairs_than_votes(method):
    table, _, better = planted(200, seed=3, off=2)
    read = read_labels(table, COLUMNS)
    is_x = np.array([text.startswith("answer x") for text in table.select(read.rows)["response_a"]])
    wrong = []
    for shares in (shares_of_labels(read), shares_of_labels(read, method)):
        assert np.allclose(shares.sum(1), 1)
        differs = (shares[:, 1] > shares[:, 0]) != np.where(is_x, better, 1 - better)
        wrong.append(differs[shares[:, :2].max(1) >= 0.6].mean())
    assert wrong[1] < 0.75 * wrong[0]
    with pytest.raises(
        ValueError,
        match=f"method {method} learns how good.* labels for an item .*, got 1 and .*Use the method majority",
    ):
        shares_of_labels(read_labels(long([(i, "x", "a") for i in range(30)])), method)


def test_nobody_and_no_prompt_is_on_both_sides():
    table, _, _ = planted(60, seed=4)
    read = read_labels(table, COLUMNS)
    train, test = hold_out_annotators(read, 0.2, seed=5)
    for sides in (
        [{*side.annotator} for side in (train, test)],
        [{*side.prompt[side.item]} for side in (train, test)],
    ):
        assert not sides[0] & sides[1] and all(sides)
    assert len({*test.annotator}) == 4
    assert hold_out_annotators(read, 0.0) == (read, None)


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
    assert [*left_out.values()] == [1, 1, 1, 1]  # abt, att, b, and the item with one text twice


def test_what_is_said_twice_counts_once_and_contradictions_do_not_count():
    table = long([(0, "x", "a"), (0, "x", "a"), (1, "x", "a"), (1, "x", "b"), (1, "y", "b"), (0, "y", "a")])
    read = read_labels(table)
    assert len(read) == 3 and read.repeats.tolist() == [2, 0] and read.contradictions.tolist() == [1, 0]
    assert read.counts().tolist() == [[2, 0, 0], [0, 1, 0]]


def test_spaces_around_a_name_make_no_other_annotator_and_no_other_item():
    rows = [(i, who, "ab"[i % 3 == j]) for i in range(6) for j, who in enumerate("xyz")]
    plain = long(rows).map(lambda row: {"item": f"i{row['prompt']}"})
    draw = np.random.default_rng(0)
    spaces = [" ", "", "\t", "  ", "\u00a0"]

    def typed(row):
        return row | {name: draw.choice(spaces) + row[name] + draw.choice(spaces) for name in ("annotator", "item")}

    columns = Columns(item="item")
    one, other = (read_labels(table, columns) for table in (plain, plain.map(typed)))
    assert one.annotators == other.annotators == ["x", "y", "z"] and one.item.tolist() == other.item.tolist()
    blank = read_labels(long([*rows, (0, "  ", "a")]))
    assert blank.missing == 1 and blank.annotators == ["x", "y", "z"]


@pytest.mark.parametrize(
    "rows, sentence",
    [
        ([(i, "x", "a") for i in range(4)], "one annotator, so agreement is not known"),
        ([(i, "xy"[i % 2], "a") for i in range(4)], "No item has labels of two annotators"),
        ([(i, who, "tie") for i in range(4) for who in "xyz"], "All labels are ties"),
        ([(i, who, "a") for i in range(4) for who in "xyz"], "are the same, so α is not defined"),
        ([(i, who, "ab"[i % 2]) for i in range(4) for who in "xy"], "not which of them is off"),
        ([(i, who, "ab"[i % 2]) for i in range(4) for who in "xyz"], "3 of 3 annotators have fewer than 20 labels"),
    ],
)
def test_what_cannot_be_known_is_said(rows, sentence):
    report = agreement_report(read_labels(long(rows)))
    assert any(sentence in said for said in report["unknown"])
    json.dumps(report, allow_nan=False)


ROW = {"prompt": "p", "response_a": "x", "response_b": "y", "annotator": "ann", "choice": "a"}


@pytest.mark.parametrize(
    "rows, columns, message",
    [
        ([ROW], {"choice": "label"}, r"lacks the column\(s\) 'label'; it has 'prompt', 'response_a'"),
        ([ROW, ROW | {"choice": "2"}], {}, "the column 'choice' holds '2' in row 1, not one of a, b, tie"),
        ([ROW | {"choice": None}], {}, "the table has 1 rows, but none has a label"),
        ([ROW | {"annotator": None}], {}, "but none has a label"),
        ([ROW], {"choice": "choice", "scores": ("s", "t")}, "a choice or a score, but both are given"),
        ([ROW], {"annotator": "annotator", "annotators": ("ann",)}, "annotators for a wide one: give one"),
        ([ROW], {"annotators": ("choice",), "time": "t"}, "time 't' is for a long table"),
        ([ROW], {"scores": ("response_a", "response_b")}, "'response_a' must hold numbers, but row 0 has 'x'"),
        ([ROW], {"time": "choice"}, "the column 'choice' must hold times, but row 0 has 'a'"),
        (
            [ROW, ROW | {"prompt": "q"}],
            {"item": "response_a"},
            "rows 0 and 1 have the same 'response_a', but different texts",
        ),
        ([ROW], {"values": ("a", "a")}, "values must mean the first answer, the second"),
    ],
)
def test_bad_tables_are_refused(rows, columns, message):
    with pytest.raises(ValueError, match=message):
        read_labels(Dataset.from_list(rows), Columns(**columns))


# ---- Rankings ----


def rankings(seed=0, prompts=12, answers=4):
    """prompt -> annotator -> answer -> rank, 1 the best; some are equal, some are not ranked."""
    draw = np.random.default_rng(seed)
    found = {}
    for i in range(prompts):
        quality = draw.normal(size=answers)
        ranks = {who: 1 + (-(quality + draw.normal(size=answers))).round(0).argsort().argsort() for who in CHOICES}
        for rank in ranks.values():
            rank[draw.integers(answers)] = draw.integers(1, answers + 1)
        kept = {who: [a for a in range(answers) if draw.random() < 0.8] for who in ranks}
        found[f"p{i}"] = {who: {f"a{a} of {i}": int(ranks[who][a]) for a in kept[who]} for who in ranks}
    return found


def one_a_row(given, draw):
    rows = [
        {"prompt": prompt, "answer": answer, "annotator": who, "rank": rank, "seconds": 3.0}
        for prompt, people in given.items()
        for who, ranks in people.items()
        for answer, rank in ranks.items()
    ]
    return Dataset.from_list([rows[i] for i in draw.permutation(len(rows))])


def several_a_row(given, draw):
    """Answers in another order in each row; what is not ranked has none, or no text, either."""
    rows = []
    for prompt, people in given.items():
        for who, ranks in people.items():
            cells = [(answer, -rank) for answer, rank in ranks.items()] + [("not ranked", None), (None, None)] * 2
            cells = [cells[i] for i in draw.permutation(4)] if len(ranks) == 4 else cells[:4]
            row = {f"r{i}": answer for i, (answer, _) in enumerate(cells)} | {
                f"s{i}": s for i, (_, s) in enumerate(cells)
            }
            rows.append({"prompt": prompt, "who": who, **row})
    return Dataset.from_list(rows)


def a_column_each(given, draw):
    answers = {(p, answer) for p, people in given.items() for ranks in people.values() for answer in ranks}
    each = [{"prompt": p, "answer": a} | {who: given[p][who].get(a) for who in CHOICES} for p, a in sorted(answers)]
    return Dataset.from_list(each)


def said(table, columns):
    """(prompt, both answers, who) -> the winner, or "tie"."""
    read = read_labels(table, columns)
    texts = np.stack([table[name][:] for name in columns.responses], 1).ravel()
    prompts = np.array(table["prompt"][:])[read.rows]
    found = {}
    for item, who, choice in zip(read.item, read.annotator, read.choice, strict=True):
        both = texts[read.answers[item]]
        found[prompts[item], frozenset(both.tolist()), read.annotators[who]] = [*both, "tie"][choice]
    assert len(found) == len(read)
    return read, found


FOUR = Columns(responses=("r0", "r1", "r2", "r3"), annotator="who", scores=("s0", "s1", "s2", "s3"))
RANKS = Columns(responses=("answer",), scores=("rank",), lowest_wins=True, seconds="seconds")
RANKED = [(one_a_row, RANKS), (several_a_row, FOUR)]
RANKED += [(a_column_each, Columns(responses=("answer",), annotators=tuple(CHOICES), lowest_wins=True))]


@pytest.mark.parametrize("make, columns", RANKED)
def test_rankings_say_what_each_of_their_pairs_says(make, columns, monkeypatch):
    monkeypatch.setattr(labels, "_ROWS", 7)
    given = rankings()
    expected = {}
    for prompt, people in given.items():
        for who, ranks in people.items():
            for a, b in itertools.combinations(ranks, 2):
                winner = "tie" if ranks[a] == ranks[b] else min(a, b, key=ranks.get)
                expected[prompt, frozenset([a, b]), who] = winner
    table = make(given, np.random.default_rng(1))
    read, found = said(table, columns)
    assert found == expected and {"tie"} < {*found.values()} and (np.diff(read.rows) >= 0).all()
    report = agreement_report(read)
    votes = {}
    for (prompt, both, _), winner in expected.items():
        votes.setdefault((prompt, both), []).append(winner)
    pairs = [a == b for each in votes.values() for a, b in itertools.combinations(each, 2)]
    assert report["agreement"] == pytest.approx(np.mean(pairs)) and report["items"] == len(votes)
    made = {(p["prompt"], p["chosen"], p["rejected"]): p["confidence"] for p in majority_pairs(table, read, columns)}
    for (prompt, chosen, rejected), confidence in made.items():
        given_votes = votes[prompt, frozenset([chosen, rejected])]
        assert confidence == pytest.approx(given_votes.count(chosen) / len(given_votes))
    assert len(made) == sum(
        max(each.count(w) for w in {*each} - {"tie"} or {0}) / len(each) > 0.6 for each in votes.values()
    )


def test_labels_of_one_prompt_are_no_more_sure_for_being_many():
    """The same labels four times over, as pairs of the same prompts, change no interval and no z-score."""
    table, _, _ = planted(40, seed=6)
    table = table.remove_columns("item")
    again = [
        table.map(lambda row, n=n: {f"response_{c}": row[f"response_{c}"] + n for c in "ab"}) for n in ("", " 2", " 3")
    ]
    columns = Columns(seconds="seconds", time="time")
    once, thrice = (agreement_report(read_labels(each, columns)) for each in (table, concatenate_datasets(again)))
    assert thrice["labels"] == 3 * once["labels"]
    assert thrice["alpha_interval"] == pytest.approx(once["alpha_interval"], abs=2e-3)
    for name in ("z", "lean_z", "drift_z"):
        values = [{row["annotator"]: row[name] for row in report["annotators"]} for report in (once, thrice)]
        assert values[1] == pytest.approx(values[0], rel=0.02, abs=0.15 * (name == "drift_z")), name


def test_too_many_answers_to_a_prompt_are_refused():
    table = Dataset.from_dict({"prompt": [""] * 101, "answer": [f"a{i}" for i in range(101)], "rank": range(101)})
    table = table.add_column("annotator", ["ann"] * 101)
    with pytest.raises(
        ValueError, match="'ann' scored 101 answers to the prompt in row 0, but at most 100 are compared"
    ):
        read_labels(table, replace(RANKS, seconds=None))


# ---- Noisy Bradley-Terry ----


def compared(seed, answers=60, people=10, labels=3000):
    """Comparisons of answers with known scores by people of whom one tosses a coin, and one is contrary."""
    draw = np.random.default_rng(seed)
    scores, eta = draw.normal(size=answers) * 1.5, np.array([0.5, 0.05, *[0.95] * (people - 2)])
    first, second = (draw.integers(0, answers, labels) for _ in range(2))
    second = np.where(first == second, (second + 1) % answers, second)
    who = draw.integers(0, people, labels)
    p = 1 / (1 + np.exp(scores[second] - scores[first]))
    wins = (draw.random(labels) < eta[who] * p + (1 - eta[who]) * (1 - p)).astype(float)
    return scores, eta, (first, second, wins, who)


def test_the_posterior_is_the_papers_and_its_gradient_the_slope():
    draw = np.random.default_rng(0)
    _, _, (first, second, wins, who) = compared(0, answers=5, people=3, labels=40)
    wins[:6] = 0.5
    given, x = (first, second, wins, who, 5), draw.normal(size=8)
    value, gradient = negative_log_posterior(x, *given)
    slow = sum(s**2 for s in x[:5]) / 2
    eta = [1 / (1 + math.exp(-rho)) for rho in x[5:]]
    for i, j, win, k in zip(first, second, wins, who, strict=True):
        i_beats_j = math.exp(x[i]) / (math.exp(x[i]) + math.exp(x[j]))
        prefers_i = eta[k] * i_beats_j + (1 - eta[k]) * (1 - i_beats_j)
        slow -= win * math.log(prefers_i) + (1 - win) * math.log(1 - prefers_i)
    slow -= sum(7 * math.log(e) + math.log(1 - e) for e in eta)
    assert value == pytest.approx(slow)
    steps = np.eye(8) * 1e-5
    slopes = [
        (negative_log_posterior(x + h, *given)[0] - negative_log_posterior(x - h, *given)[0]) / 2e-5 for h in steps
    ]
    np.testing.assert_allclose(gradient, slopes, rtol=1e-6, atol=1e-8)


def test_scores_and_annotators_that_were_planted_are_found():
    truth, eta, given = compared(1)
    scores, found = noisy_bradley_terry(*given)
    assert np.corrcoef(scores, truth)[0, 1] > 0.97 and np.abs(found - eta).max() < 0.15
    turned = given[1], given[0], 1 - given[2], given[3]
    np.testing.assert_allclose(noisy_bradley_terry(*turned)[0], scores, atol=1e-3)
    # Ties alone say nothing of answers and of people: the modes of the priors, 0 and (8 − 1)/(8 + 2 − 2)
    scores, found = noisy_bradley_terry(given[0], given[1], np.full(3000, 0.5), given[3])
    np.testing.assert_allclose(scores, 0, atol=1e-6)
    np.testing.assert_allclose(found, 7 / 8, atol=1e-4)


@pytest.mark.slow
def test_scores_of_answers_make_fewer_wrong_pairs_than_votes():
    ways = ranked_outcome(1, in_pairs=True, per=3, off=3, prompts=150)
    (right, wrong, _), (votes_right, votes_wrong, _) = ways["noisy Bradley–Terry"], ways["majority"]
    assert wrong < 0.4 * votes_wrong and right > 0.95 * votes_right
    table, columns, _ = planted_rankings(0, per=1, prompts=2)
    with pytest.raises(
        ValueError, match="method noisy_bt learns .* labels for an answer .* of the median annotator, got 3 and 6"
    ):
        shares_of_labels(read_labels(table, columns), "noisy_bt")


def test_an_annotator_of_one_prompt_has_no_error():
    values = np.array([0.1, 0.2, 0.4, 0.5, 0.7, 1.0])
    for size in range(1, len(values)):  # the residuals of some have the sum 1e-17 instead of 0
        mean, error = mean_and_error(np.zeros(size, int), np.zeros(size, int), values[:size], 1)
        assert mean == pytest.approx(values[:size].mean()) and np.isnan(error)
    assert np.isfinite(mean_and_error(np.zeros(6, int), np.arange(6), values, 1)[1])
