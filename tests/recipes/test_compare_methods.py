"""The study of all methods: its arithmetic by hand, its order, and each arm once in a short world."""

import fcntl
import json
import random
from dataclasses import replace

import pytest

from recipes import compare_methods
from recipes.compare_methods import (
    ARMS,
    PEOPLE,
    conclusions,
    gains,
    head_to_head,
    main,
    revision,
    table,
    tuned,
    written,
)
from recipes.demo import judges, world
from trl_ext.runs import read_jsonl
from trl_ext.runs.output_dir import LOCK

RLAIF = "RLAIF, error 10 %, gate"
PROMPT = f"hello , my lamp gets too hot . it was a gift . {world.AGENT}"
GOOD = f"this is about your lamp . {world.PROBLEMS['hot'][1]} . have a very nice day ."


def row(seed, gold, kl=1.0, refused=None, trial=0, kappa=0.7):
    figures = {"kl": {"mean": kl}, "distinct_3": 0.1, "self_bleu": 0.9, "length": {"mean": 20.0}}
    cost = {"people": 400, "judge_calls": 0, "cpu_seconds": 8.4}
    return {"seed": seed, "gold": gold, "figures": figures, "cost": cost, "refused": refused, "kappa": kappa} | {
        "trial": trial
    }


def test_wins_and_gains_are_of_the_same_prompts_and_seeds():
    mine = [row(0, [1.0, 0.5, 0.0, 0.0]), row(1, [1.0, 1.0, 1.0, 1.0]), row(2, [0.0])]
    theirs = [row(1, [0.0, 0.0, 1.0, 1.0]), row(0, [0.0, 0.5, 0.0, 1.0])]
    assert head_to_head(mine, theirs) == [0.5, 0.75]  # a win, two ties, a loss; two wins, two ties
    assert gains(mine, theirs) == [0.0, 0.5]


def test_the_table_compares_within_a_seed_and_says_who_was_refused():
    rows = {
        "SFT": [row(0, [0.0, 0.0], kl=0.0), row(1, [0.5, 0.5], kl=0.0)],
        PEOPLE: [row(0, [0.5, 0.5]), row(1, [1.0, 1.0])],
        RLAIF: [row(0, [1.0, 0.5]), row(1, [0.5, 0.5], refused="kappa is 0.40")],
    }
    lines = table(rows).splitlines()
    assert lines[2].startswith("| SFT | 0 | – | 0.000 ± 0.000 | 0.00 |")
    # +0.75 and 0 above SFT: 0.375 ± 12.7062 · 0.530 / √2; wins over SFT 1 and 1/2, over people 3/4 and 0
    assert lines[4].startswith(
        f"| {RLAIF} | +0.375 ± 4.765 | 0.750 ± 3.177 | 0.375 ± 4.765 | 1.00 | 0.100 | 0.900 | 20.0 "
    )
    assert lines[4].endswith("| 400 | 0 | 8 | 2, refused in 1 |")
    said = conclusions(rows)
    assert said.startswith(f"Most gold: {PEOPLE}, +0.125 ± 4.765 above {RLAIF}, the next.")
    assert f"| {RLAIF} | 0.70 | 1 of 2 | +0.750 | 0.375 ± 4.765 |".replace("+", "") in said
    assert f"reached by {RLAIF}." in said
    rows[RLAIF][0]["gold"] = [0.5, 0.0]
    assert "not reached." in conclusions(rows)


def test_the_trial_with_the_most_gold_is_chosen_and_a_refused_arm_takes_the_first():
    tuning = {"PPO": [row(8, [0.1], trial=0), row(9, [0.3], trial=0), row(8, [0.5], trial=1), row(9, [0.0], trial=1)]}
    tuning[RLAIF] = [row(8, [0.2], trial=i, refused="no") for i in (0, 1)]
    assert tuned(tuning) == {"PPO": ARMS["PPO"].trials[1], RLAIF: ARMS[RLAIF].trials[0]}


def test_a_revision_keeps_its_principle_unless_it_is_one_that_errs():
    draw = random.Random(0)
    bad = " ".join(
        [
            "so your radio again .",
            "please replace the rubber seal .",
            *world.FILLERS,
            "so your radio again .",
            "that is all .",
        ]
    )
    for name in judges.PRINCIPLES:
        kept = {
            is_right: world.judge(revision(bad, name, "lamp", "hot", is_right, draw), "lamp", "hot")[name]
            for is_right in (True, False)
        }
        assert kept == {True: True, False: False}, name
        assert not world.judge(revision(GOOD, name, "lamp", "hot", False, draw), "lamp", "hot")[name], name


def test_the_writer_answers_criticises_and_revises():
    answer = GOOD.replace("lamp", "radio")
    asked = [PROMPT, answer, f"Here is a principle: {judges.PRINCIPLES['product']}"]
    messages = [{"role": "user", "content": text} for text in asked]
    assert written(messages[:1], {PROMPT: answer}, error=0) == answer
    critique = written(messages, {}, error=0)
    assert critique == "It breaks the principle." != written(messages, {}, error=1)
    messages += [{"role": "assistant", "content": critique}, {"role": "user", "content": "Write it again."}]
    assert written(messages, {}, error=0) == GOOD
    messages[3]["content"] = "It keeps the principle."
    assert written(messages, {}, error=0) == answer


def test_trials_first_then_each_seed_with_all_arms_and_nothing_twice(monkeypatch, tmp_path, capsys):
    asked = []

    def trained(of, name, trial):
        asked.append((of, name, ARMS[name].trials.index(trial)))
        made = row(of, [0.5 + 0.1 * ARMS[name].trials.index(trial)])
        return {key: made[key] for key in ("gold", "figures", "cost", "refused", "kappa")}

    monkeypatch.setattr(compare_methods, "run", trained)
    monkeypatch.setattr(compare_methods, "Draw", lambda args, seed: seed)
    flags = ["--arms", "SFT", PEOPLE, RLAIF, "--tuning_seeds", "8", "--output_dir", str(tmp_path)]
    main([*flags, "--seeds", "0"])
    assert asked == [
        (8, PEOPLE, 0),
        (8, PEOPLE, 1),
        (8, RLAIF, 0),
        (8, RLAIF, 1),
        (0, "SFT", 0),
        (0, PEOPLE, 1),
        (0, RLAIF, 1),
    ]
    main([*flags, "--seeds", "0", "1"])
    assert asked[7:] == [(1, "SFT", 0), (1, PEOPLE, 1), (1, RLAIF, 1)]
    assert (tmp_path / "compare_methods.md").read_text() in capsys.readouterr().out
    assert (tmp_path / "compare_methods.png").stat().st_size > 5000
    with pytest.raises(SystemExit):
        main([*flags, "--seeds", "0", "--labels", "300"])
    assert "other settings" in capsys.readouterr().err


def test_a_second_process_with_the_same_folder_is_refused(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(compare_methods, "run", lambda *given: pytest.fail("it trains"))
    monkeypatch.setattr(compare_methods, "Draw", lambda args, seed: seed)
    with open(tmp_path / LOCK, "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(SystemExit):
            main(["--output_dir", str(tmp_path)])
    assert f"`output_dir` {tmp_path} is in use by another process: wait for that run" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [["--seeds", "8"], ["--arms", "SFT"], ["--arms", "SFT", PEOPLE, "GRPO"], ["--known", "400"], ["--known", "10"]],
)
def test_a_study_that_makes_no_sense_is_refused(flags, capsys):
    with pytest.raises(SystemExit):
        main(flags)
    assert "`" in capsys.readouterr().err.strip().splitlines()[-1]


# What differs from another arm by a number alone is `extra`: errors, votes, and the second trial of each
OF_ITS_OWN = ("SFT", "best-of-n", PEOPLE, "online DPO", "PPO, ensemble", "RLAIF, slip 25 %, gate", "CAI")


@pytest.mark.slow
@pytest.mark.parametrize(
    "arms",
    [
        pytest.param({name: replace(ARMS[name], trials=ARMS[name].trials[:1]) for name in OF_ITS_OWN}, id="each kind"),
        pytest.param(ARMS, id="all", marks=pytest.mark.extra),
    ],
)
def test_each_arm_in_a_short_world(arms, tmp_path, monkeypatch):
    monkeypatch.setattr(compare_methods, "ARMS", arms)
    sizes = ["--short", "true", "--labels", "60", "--known", "40", "--prompts", "16", "--arms", *arms]
    main([*sizes, "--seeds", "0", "--tuning_seeds", "8", "--output_dir", str(tmp_path)])
    rows = [json.loads(file.read_text()) for file in (tmp_path / "runs" / "seed-0").glob("*.json")]
    assert {each["name"] for each in rows} == {*arms} and all(len(each["gold"]) == 16 for each in rows)
    refused = {each["name"] for each in rows if each["refused"]}
    assert "RLAIF, slip 25 %, gate" in refused and not any("no gate" in name for name in refused)
    pairs = list(read_jsonl(tmp_path / "seed-0-short" / "draw-0" / "labels" / "people" / "train.jsonl"))
    assert len(pairs) == 60
