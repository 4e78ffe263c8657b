"""Watches on completions written by hand."""

import json
import pickle
from types import SimpleNamespace

import pytest

from trl_ext.rewards import (
    GoldJudgeReward,
    PhraseReviewReward,
    RepetitionWatch,
    ScoreWatch,
    score_watch,
)


def call(watch, completions, step=0, prompts=None, folder=None, **columns):
    """Call a watch; return the scores and the logged metrics."""
    logged = {}
    prompts = prompts or [f"prompt {i}" for i in range(len(completions))]
    state = SimpleNamespace(global_step=step, trl_ext_folder=folder)  # JSONLCallback sets the folder
    scores = watch(
        prompts=prompts,
        completions=completions,
        completion_ids=[[1]] * len(completions),
        log_metric=logged.__setitem__,
        trainer_state=state,
        **columns,
    )
    return scores, logged


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("watch", [RepetitionWatch(), PhraseReviewReward(["a"]), ScoreWatch(lambda **_: [])])
def test_no_completions_have_no_scores(watch):
    assert call(watch, []) == ([], {})


# ---- Repetition ----


def test_repetition():
    scores, logged = call(RepetitionWatch(n=2), ["a b a b", "a b c", "x"])
    # bigrams: ab ba ab, ab bc, none: 3 distinct of 5; 1 of 3 is a repetition of ab; 2 of 3 have ab
    assert scores == [None, None, None]
    assert logged == {
        "repetition/distinct_2": 3 / 5,
        "repetition/repeated": pytest.approx((1 / 3) / 3),
        "repetition/top_phrase_share": 2 / 3,
    }


def test_a_watch_writes_to_the_folder_of_the_run_that_calls_it(tmp_path):
    watch = ScoreWatch(quality)
    for run, given in (("a", ["1"]), ("b", ["2", "3"]), (None, ["4"])):
        call(watch, given, folder=run and tmp_path / run)
    assert [len(rows(tmp_path / run / "completions.rank0.jsonl")) for run in "ab"] == [1, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_a_completion_has_one_line_with_the_scores_of_all_watches(tmp_path):
    first, second = (ScoreWatch(quality, name=name, folder=tmp_path) for name in ("one", "two"))
    for step, given in enumerate((["1", "1", "2"], ["1", "1", "2"], ["2"])):
        call(first, given, step=step)
        call(second, given[:1] if step == 1 else given, step=step)
    written = [(row["step"], row["completion"], row["scores"]) for row in rows(tmp_path / "completions.rank0.jsonl")]
    both, one = ({"one": 1.0, "two": 1.0}, {"one": 1.0})
    two = {"one": 2.0, "two": 2.0}
    assert written[:3] == [(0, "1", both), (0, "1", both), (0, "2", two)]
    assert written[3:] == [(1, "1", both), (1, "1", one), (1, "2", {"one": 2.0}), (2, "2", two)]


def test_top_phrase_and_completions_file(tmp_path):
    watch = RepetitionWatch(folder=tmp_path, score=0.0)
    scores, _ = call(watch, ["i love you so", "well i love you", "go away now"], step=7)
    assert watch.top_phrase == "i love you" and scores == [0.0, 0.0, 0.0]
    written = rows(tmp_path / "completions.rank0.jsonl")
    assert written[0].pop("timestamp") > 1e9
    assert written[0] == {
        "step": 7,
        "rank": 0,
        "prompt": "prompt 0",
        "completion": "i love you so",
        "scores": {
            "repetition_watch": {
                "repeated": 0.0,
                "has_top_phrase": True,
                "top_phrase": "i love you",
                "copied": False,
            }
        },
    }
    assert [row["scores"]["repetition_watch"]["has_top_phrase"] for row in written] == [True, True, False]


def test_copies_of_a_corpus():
    watch = RepetitionWatch(corpus=["one two three four five"], copied_words=4)
    _, logged = call(watch, ["so two three four five", "two three four", "one two four five"])
    assert logged["repetition/copied_share"] == 1 / 3
    assert call(pickle.loads(pickle.dumps(watch)), ["two three four five"])[1]["repetition/copied_share"] == 1


# ---- Scores ----


def quality(completions, **kwargs):
    return [None if not c else float(c) for c in completions]


def test_score_watch_replaces_a_function(tmp_path):
    watch = score_watch(quality, bound=0.8, quantiles=(0.0, 0.5, 1.0), folder=tmp_path)
    scores, logged = call(watch, ["0.1", "", "0.9", "0.5"])
    assert scores == [0.1, None, 0.9, 0.5] and watch.__name__ == "quality"
    assert logged == {
        "score_watch/quality/q00": 0.1,
        "score_watch/quality/q50": 0.5,
        "score_watch/quality/q100": 0.9,
        "score_watch/quality/share_above": 1 / 3,
    }
    assert [row["scores"]["quality"] for row in rows(tmp_path / "completions.rank0.jsonl")] == [0.1, None, 0.9, 0.5]


# ---- Phrases ----


def test_phrases_are_queued_without_scores(tmp_path):
    watch = PhraseReviewReward(["I love  you", "c++"], folder=tmp_path)
    scores, logged = call(watch, ["well, i LOVE\nyou.", "i love your cat", "use c++ then"], step=3)
    assert scores == [None] * 3 and logged == {"phrase_review/share": 2 / 3}
    queue = rows(tmp_path / "review.rank0.jsonl")
    assert [(row["step"], row["completion"][:3], row["phrases"]) for row in queue] == [
        (3, "wel", ["i LOVE\nyou"]),
        (3, "use", ["c++"]),
    ]


def test_veto():
    for none in ([], [" "]):  # an empty pattern would match each completion
        with pytest.raises(ValueError, match="at least one phrase"):
            PhraseReviewReward(none)
    assert call(PhraseReviewReward("bad", veto=-1.0), ["so bad", "badly"])[0] == [-1.0, 0.0]


def test_phrases_are_found_in_any_script_and_form(subtests):
    for phrase, text, is_found in [
        ("我爱你", "所以我爱你们。", True),  # without spaces there are no word boundaries
        ("愛してる", "本当に愛してるよ", True),
        ("ฉันรัก", "ว่าฉันรักเธอ", True),
        ("love", "我love你", True),
        ("i love you", "_i love you_ and **more**", True),
        ("i love you", "i\u200blove\u200byou", True),  # zero-width spaces, between words and within
        ("i love you", "I lo\u200bve you", True),
        ("\u200bi love you", "i love you", True),
        ("c++", "use c++11", True),
        ("café", "cafe\u0301", True),
        ("i love you", "Ｉ　ｌｏｖｅ　ｙｏｕ", True),
        ("사랑", "나는 사랑 해", True),
        ("사랑", "사랑해", False),
        ("c++", "abc++", False),
        ("love", "glove", False),
        ("love", "lové", False),
        ("cat", "a\u200bcat\u200bsat", True),
        ("कर", "करि", False),  # a vowel sign belongs to the word
    ]:
        with subtests.test(phrase=phrase, text=text):
            assert call(PhraseReviewReward(phrase, veto=-1.0), [text])[0] == [-1.0 if is_found else 0.0]


# ---- Gold ----


def judge(completions, topic, **kwargs):
    return [float(c) for c in completions]


def test_the_gold_judge_scores_only_marked_rows():
    watch = GoldJudgeReward(judge)
    assert call(watch, ["1", "2"], topic=["a", "b"]) == ([None, None], {})  # training rows have no such column
    assert call(watch, ["1", "2"], topic=["a", "b"], held_out=[False, True]) == ([None, 2.0], {})


def test_win_rate_against_the_first_evaluation(tmp_path):
    columns = {"topic": ["a"] * 4, "held_out": [True] * 4}
    watch = GoldJudgeReward(judge, folder=tmp_path)
    assert call(watch, ["1", "2", "3", "4"], **columns)[1] == {}
    later = call(watch, ["2", "2", "1", "5"], step=8, **columns)[1]
    assert later == {"gold/win_rate": (1 + 0.5 + 0 + 1) / 4, "gold/tie_rate": 0.25}
    resumed = GoldJudgeReward(judge, folder=tmp_path)  # compares with the initial policy, not with step 16
    assert call(resumed, ["0", "0", "0", "9"], step=16, **columns)[1]["gold/win_rate"] == 0.25
    others = tmp_path / "gold_start.rank3.jsonl"  # this run has four processes, the next one has one
    others.write_text((tmp_path / "gold_start.rank0.jsonl").read_text().replace('"processes": 1', '"processes": 4'))
    next_run = GoldJudgeReward(judge, folder=tmp_path)
    call(next_run, ["9", "9", "9", "9"], **columns)
    again = GoldJudgeReward(judge, folder=tmp_path)
    assert call(again, ["5", "5", "5", "5"], step=8, **columns)[1]["gold/win_rate"] == 0.0
