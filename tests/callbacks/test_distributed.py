"""Two gloo processes decide the same: they stop and save at one step, and neither waits for the other."""

import json

import pytest

from tests.launch import on_two_processes
from tests.tiny import tiny_llama, tiny_tokenizer

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    folder = tmp_path_factory.mktemp("distributed")
    tiny_llama().save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    return folder, *on_two_processes(("tests.callbacks.worker", folder))


def test_canary_and_judge_follow_the_main_process(launch):
    first, second = (results["canary"] for results in launch[1])
    assert first["alerts"] == second["alerts"] and first["step"] == second["step"] == 6
    assert first["judged"] == [3, 3] and second["judged"] == []
    gold = [
        [log["eval_gold/mean"] for log in results["history"] if "eval_gold/mean" in log] for results in (first, second)
    ]
    assert gold[0] == gold[1] and len(gold[0]) == 2
    assert len((launch[0] / "canary" / "canary.jsonl").read_text().splitlines()) == 7


def test_gathered_metrics_stop_both_processes_at_one_step(launch):
    folder, results = launch
    first, second = (result["rloo"] for result in results)
    assert first["alerts"] == second["alerts"] and first["step"] == second["step"] < 6
    assert first["checkpoints"] == [f"checkpoint-{first['step']}"]
    for rank in range(2):
        events = [json.loads(line) for line in (folder / f"rloo/metrics.rank{rank}.jsonl").read_text().splitlines()]
        assert {event["rank"] for event in events} == {rank} and events[0]["type"] == "begin"
        written = [json.loads(x) for x in (folder / f"rloo/completions.rank{rank}.jsonl").read_text().splitlines()]
        assert {row["rank"] for row in written} == {rank}
    assert len((folder / "rloo/alerts.jsonl").read_text().splitlines()) == len(first["alerts"])


def test_a_stop_holds_on_both_processes(launch):
    first, second = (result["again"] for result in launch[1])
    two, four, six = "checkpoint-2", "checkpoint-4", "checkpoint-6"
    assert first == second
    refused = ("Stopped", [two, four])
    assert first == dict.fromkeys(first, [(4, [two, four]), refused, (6, [two, four, six])])
