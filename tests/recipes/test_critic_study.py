"""The study of what a critic is worth: its worlds by hand, its arithmetic on curves made by hand, and a short run."""

import json
import math
import random
from pathlib import Path

import pytest
import torch

from recipes.studies.critic import area, chosen_rate, figures, main, overview, reached, summary, table
from recipes.studies.worlds import FIRST, Chain, Lake, make_model, make_tokenizer


def a_run(method, scores, tokens=(10, 20, 30), seconds=(1, 2, 4), **more):
    found = {"method": method, "best": 1.0, "tokens": tokens, "seconds": seconds, "scores": scores}
    return {"rate": 1e-3, "explained": [], "weights": [], **found, **more}


def test_a_chain_is_scored_by_its_successors():
    chain = Chain(4, seed=3)
    first = chain.successor[0]
    second, s0 = chain.successor[first], "s0"
    ids = [FIRST + word for word in (first, second, 0, first)]  # the third is wrong
    assert chain.scores([s0], [ids]) == [0.75]
    told = Chain(4, is_dense=True, seed=3).told([s0], [ids], [0.75], by_token=True)
    assert told == [[0.25, 0.25, 0.0, 0.25]]
    noisy = Chain(4, flips=0.25, seed=3).told([s0] * 4000, [ids] * 4000, [0.75] * 4000, by_token=True)
    assert set(noisy) == {0.75, 0.25} and abs(noisy.count(0.25) / 4000 - 0.25) < 0.03


def test_the_best_score_on_the_lake_is_what_the_best_walk_reaches():
    lake, draw = Lake(None), random.Random(0)
    wins, episodes = 0, 4000
    for _ in range(episodes):
        place = draw.choice(lake.starts)
        for left in range(lake.turns, 0, -1):
            odds = [sum(p * lake.values[left - 1][to] for p, to in lake.outcomes(place, a)) for a in range(4)]
            place = lake.step(place, max(range(4), key=odds.__getitem__), draw)
            if lake.ice[place] in "GH":
                break
        wins += lake.ice[place] == "G"
    assert wins / episodes == pytest.approx(lake.best, abs=4 * math.sqrt(0.25 / episodes))
    # Down from the first place: 0.8 down, 0.1 left into the wall, 0.1 right
    assert lake.outcomes(0, 1) == [(0.8, 4), (pytest.approx(0.1), 1), (pytest.approx(0.1), 0)]


def test_an_episode_is_read_as_it_was_played():
    lake = Lake(None, seed=5)
    model = make_model(lake, 0).eval()
    torch.manual_seed(0)
    played = lake.play(model, 8, make_tokenizer(lake))
    columns = ("prompt_ids", "completion_ids", "logprobs", "env_mask")
    for prompt, answer, logprobs, mask in zip(*map(played.get, columns), strict=True):
        assert mask == [1, 0] * (len(answer) // 2) + [1] and lake.drawn(answer) == sum(mask)
        with torch.no_grad():  # all at once, without a cache
            odds = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        expected = odds.gather(1, torch.tensor(answer)[:, None])[:, 0] * torch.tensor(mask)
        torch.testing.assert_close(torch.tensor(logprobs), expected, rtol=1e-4, atol=1e-5)
    assert len({tuple(prompt) for prompt in played["prompt_ids"]}) > 1


def test_the_area_under_a_curve():
    # 0.5 until 10 tokens, then to 1 at 20: 10 · 0.5 + 10 · 0.75
    assert area([10, 20], [0.5, 1.0], 20) == pytest.approx(12.5 / 20)
    assert area([10, 20], [0.5, 1.0], 15) == pytest.approx((5 + 5 * 0.625) / 15)
    assert area([10, 20], [0.5, 1.0], 5) == pytest.approx(0.5)


def test_where_a_share_is_reached():
    # Moving means of three, two at the ends: 0.1, 0.3, 0.5, 0.75
    assert reached([10, 20, 30, 40], [0.0, 0.2, 0.7, 0.6 + 0.2], 0.5) == 30
    assert reached([10, 20], [0.0, 0.2], 0.5) == math.inf


def test_the_rate_with_the_highest_area_is_chosen():
    slow, fast = a_run("PPO", (0.2, 0.3, 0.9)), a_run("PPO", (0.2, 0.7, 0.8), rate=3e-3)
    assert chosen_rate([slow, fast]) == 3e-3


def test_figures_are_shares_of_the_gain_on_what_all_have_spent():
    # From (0.1 + 0.3) / 2 = 0.2 to 1; the second spends 2 of 4 seconds
    found = figures([a_run("PPO", (0.1, 0.6, 1.0)), a_run("mean", (0.3, 0.6, 0.6), seconds=(0.5, 1, 2))])
    shares = [(score - 0.2) / 0.8 for score in (0.1, 0.6, 1.0)]
    assert found["PPO"]["by tokens"] == pytest.approx((shares[0] + (shares[0] + shares[1]) / 2 + 0.75) / 3)
    assert found["PPO"]["by seconds"] == pytest.approx((shares[0] + (shares[0] + shares[1]) / 2) / 2)
    assert found["mean"]["end"] == pytest.approx((0.1 / 0.8 + 1) / 3)
    assert found["mean"]["tokens to 0.5"] == math.inf and found["mean"]["explained"] is None


def test_the_summary_pairs_the_seeds():
    seeds = [
        [a_run("PPO", (0.0, low, 0.5), explained=[0.1, 0.3]), a_run("mean", (0.0, low + 0.2, 0.5))]
        for low in (0.1, 0.3)
    ]
    cells = summary({"short": seeds}, {"short": {"PPO": 1e-3, "mean": 3e-3}}, {})
    row = cells["short"]["methods"]["mean"]
    assert row["by tokens − PPO"] == pytest.approx(0.2 * 2 / 6, abs=1e-3)  # the same in both seeds
    assert row["by tokens − PPO, 95 %"] == pytest.approx([0.2 * 2 / 6] * 2, abs=1e-3)
    assert cells["short"]["methods"]["PPO"]["explained"] == 0.3  # of the second half
    assert "| **short**, 2 seeds | PPO |" in table(cells) and "+0.07 [+0.07, +0.07]" in table(cells)
    of_ppo, of_mean = (f"{cells['short']['methods'][name]['by tokens']:.2f}" for name in ("PPO", "mean"))
    assert f"| tokens | short |\n|---|---|\n| PPO | {of_ppo} |\n" in overview(cells)
    assert f"| mean | {of_mean} [+0.07, +0.07] |\n" in overview(cells) and "| GRPO |" not in overview(cells)
    fewer = summary({"short": [seeds[0][:1], seeds[1]]}, {"short": {"PPO": 1e-3, "mean": 3e-3}}, {})
    row = fewer["short"]["methods"]["mean"]
    assert (row["seeds"], row["by tokens − PPO"]) == (1, pytest.approx(0.2 * 2 / 6, abs=1e-3))
    assert "| mean (1 seeds) |" in table(fewer)


def test_what_differs_by_a_number_alone_takes_its_seconds():
    runs = [a_run("PPO", (0.0, 0.5, 1.0)), a_run("PPO, λ 1", (0.0, 0.5, 1.0), seconds=(5, 10, 20))]
    found = figures(runs)
    assert found["PPO, λ 1"] == found["PPO"]


@pytest.mark.slow
def test_a_short_study_goes_on_where_it_was(tmp_path, capsys):
    arguments = ["--cells", "turns", "--methods", "PPO", "gated", "GRPO", "--rates", "3e-3", "--rollouts", "2"]
    arguments += ["--compared", "1"]
    main([*arguments, "--seeds", "0", "--output_dir", str(tmp_path)])
    first = {file: file.stat().st_mtime_ns for file in (tmp_path / "runs").iterdir()}
    assert (
        len(first) == 7 and sum("own_start" in file.name for file in first) == 3
    )  # one to tune and one seed, and one that compares gradients
    main([*arguments, "--seeds", "0", "1", "--output_dir", str(tmp_path)])
    assert {file: file.stat().st_mtime_ns for file in first} == first
    written = json.loads((tmp_path / "critic.json").read_text())
    assert written["cells"]["turns"]["seeds"] == 2 and len(written["runs"]) == 6
    assert -1 <= written["cells"]["turns"]["methods"]["gated"]["agreement"] <= 1
    starts = {(run["seed"], run["scores"][0]) for run in written["runs"]}
    assert len(starts) == 2  # a seed's runs begin with the same episodes
    assert "| **turns**, 2 seeds | PPO |" in (tmp_path / "critic.md").read_text()
    assert (tmp_path / "critic.png").exists()


@pytest.mark.slow
def test_the_page_shows_the_table_of_the_results():
    docs = Path(__file__).parents[2] / "docs"
    written = json.loads((docs / "critic.json").read_text())
    results = {cell: {} for cell in written["cells"]}
    for found in written["runs"]:
        results[found["cell"]].setdefault(found["seed"], []).append(found)
    rates = {cell: {run["method"]: run["rate"] for run in written["runs"] if run["cell"] == cell} for cell in results}
    seeds = {cell: list(by_seed.values()) for cell, by_seed in results.items()}
    assert summary(seeds, rates, written["compared"]) == written["cells"]
    assert overview(written["cells"]) in (docs / "critic.md").read_text()
