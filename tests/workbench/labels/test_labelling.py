"""Which answers are to be labelled, what labelling tools get of them, and what is read of what comes back."""

import json
import random
import xml.etree.ElementTree as ElementTree
from collections import Counter

import pytest

from trl_ext.workbench.labels.labelling import (
    LABEL_STUDIO_CONFIG,
    answers_to_label,
    argilla_records,
    label_studio_tasks,
    read_choices,
)

SHARES = {"score": 0.4, "disagreement": 0.3, "random": 0.3}


def answers(seed=0, prompts=40, each=3):
    """(prompt, answer, score, disagreement); scores are coarse, so that many are equal."""
    draw = random.Random(seed)
    return [
        (f"prompt {p}", f"answer {i}", draw.randrange(8) / 4, draw.random())
        for p in range(prompts)
        for i in range(each)
    ]


def chosen(rows, size=20, shares=SHARES, seed=0, ensemble=True):
    prompts, texts, scores, spread = (list(column) for column in zip(*rows, strict=True))
    found = answers_to_label(prompts, texts, scores, spread if ensemble else None, size, shares, seed)
    return [(*rows[row], why) for row, why in found.items()]


def test_each_part_of_the_queue_is_what_it_says():
    rows = answers()
    queue = chosen(rows)
    assert Counter(why for *_, why in queue) == {"score": 8, "disagreement": 6, "random": 6}
    assert len({prompt for prompt, *_ in queue}) == 20  # so no answer is there twice
    reasons = [why for *_, why in queue]
    assert reasons != sorted(reasons, key=list(SHARES).index)  # who labels cannot tell by the place

    def left(*reasons):
        taken = {prompt for prompt, *_, why in queue if why in reasons}
        return [row for row in rows if row[0] not in taken]

    for place, reasons, number in ((2, (), 8), (3, ("score",), 6)):
        best = {}
        for row in left(*reasons):
            best[row[0]] = max(best.get(row[0], -1), row[place])
        values = sorted(best.values(), reverse=True)[:number]
        why = "disagreement" if reasons else "score"
        assert sorted((row[place] for row in queue if row[-1] == why), reverse=True) == values


def test_the_choice_depends_on_the_seed_and_not_on_the_order_of_rows():
    rows = answers()
    shuffled = random.Random(1).sample(rows, len(rows))
    assert chosen(rows) == chosen(shuffled) == chosen(rows + rows)
    assert chosen(rows) != chosen(rows, seed=1)


def test_each_prompt_is_as_likely_at_random():
    rows = answers(prompts=10, each=1)
    counts = Counter(prompt for seed in range(1000) for prompt, *_ in chosen(rows, 2, {"random": 1.0}, seed))
    assert len(counts) == 10 and all(150 < number < 250 for number in counts.values())  # 200 ± 4 standard deviations


def test_without_an_ensemble_its_share_goes_to_the_others_and_answers_without_a_score_are_drawn_alone():
    assert Counter(row[-1] for row in chosen(answers(), ensemble=False)) == {"score": 11, "random": 9}
    rows = [(prompt, text, None, 0.0) for prompt, text, *_ in answers()]
    assert Counter(row[-1] for row in chosen(rows, 10, ensemble=False)) == {"random": 4}
    assert len(chosen(answers(prompts=3), 20)) == 3


@pytest.mark.parametrize("size, shares", [(0, SHARES), (5, {"score": -0.1, "random": 1}), (5, {"disagreement": 1})])
def test_what_no_queue_can_be_made_of_is_refused(size, shares):
    with pytest.raises(ValueError, match="a queue needs a size of 1 or more"):
        chosen(answers(), size, shares, ensemble=False)


QUEUE = [
    {
        "item": "i1",
        "prompt": "hi <b>",
        "response_a": "x",
        "response_b": "y & z",
        "round": 2,
        "picked": "a",
        "score_a": 1.0,
    },
    {
        "item": "i2",
        "prompt": [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}],
        "response_a": [{"role": "assistant", "content": "x"}],
        "response_b": [{"role": "assistant", "content": "y"}],
        "round": 2,
        "picked": "b",
        "score_a": 0.0,
    },
]


def test_label_studio_gets_tasks_that_fit_its_interface_and_say_nothing_of_scores():
    tasks = label_studio_tasks(QUEUE)
    assert tasks == [
        {"data": {"item": "i1", "prompt": "hi <b>", "response_a": "x", "response_b": "y & z"}},
        {"data": {"item": "i2", "prompt": "system: be kind\n\nuser: hi", "response_a": "x", "response_b": "y"}},
    ]
    view = ElementTree.fromstring(LABEL_STUDIO_CONFIG)
    shown = {text.get("name"): text.get("value") for text in view.iter("Text")}
    assert shown == {name: f"${name}" for name in tasks[0]["data"] if name != "item"}
    (choices,) = view.iter("Choices")
    assert choices.get("name") == "choice" and choices.get("toName") in shown
    assert [choice.get("value") for choice in choices] == ["a", "b", "tie"]


def test_argilla_gets_flat_records():
    assert argilla_records(QUEUE) == [
        {"id": "i1", "prompt": "hi <b>", "response_a": "x", "response_b": "y & z", "round": 2},
        {"id": "i2", "prompt": "system: be kind\n\nuser: hi", "response_a": "x", "response_b": "y", "round": 2},
    ]


def studio(task, *labels):
    """A task as Label Studio exports it: labels are (annotator, what was chosen), None for skipped."""
    annotations = [
        {
            "id": 7,
            "completed_by": who,
            "was_cancelled": said is None,
            # What was chosen before it was skipped may be there
            "result": [
                {"from_name": "choice", "to_name": "prompt", "type": "choices", "value": {"choices": [said or "a"]}}
            ],
        }
        for who, said in labels
    ]
    return {"id": 1, **task, "annotations": annotations, "predictions": []}


def argilla(record, *labels):
    people, said, status = zip(*labels, strict=True) if labels else ([], [], [])
    names = ("choice.responses", "choice.responses.users", "choice.responses.status")
    return {
        **record,
        "status": "completed",
        **{n: list(v) or None for n, v in zip(names, (said, people, status), strict=True)},
    }


LABELS = [("i1", "ann", "a"), ("i1", "bob", "tie"), ("i2", "ann", None), ("i2", "bob", "b")]


def exports():
    first, second = label_studio_tasks(QUEUE)
    flat = [{**task["data"], "id": 3, "annotation_id": 5, "lead_time": 2.1} for task in (first, second)]
    one, two = argilla_records(QUEUE)
    pairwise = studio(second, ("ann", None), ({"id": 4, "email": "bob"}, "b"))
    pairwise["annotations"][1]["result"][0] |= {"type": "pairwise", "value": {"selected": "right"}}
    records = [
        argilla(one, ("ann", "a", "submitted"), ("bob", "tie", "submitted")),
        argilla(two, ("ann", "a", "discarded"), ("bob", "b", "submitted")),
    ]
    own = [{"item": item, "annotator": who, "choice": said} for item, who, said in LABELS]
    comma = "item,annotator,choice\n" + "".join(f"{item},{who},{said or ''}\n" for item, who, said in LABELS)
    return {
        # A line separator within a text ends no line
        "own.jsonl": "\n".join(json.dumps({**row, "note": "\u2028"}, ensure_ascii=False) for row in own) + "\n",
        "own.json": json.dumps(own, indent=2),
        "own.csv": "\ufeff" + comma,
        "studio.json": json.dumps([studio(first, ("ann", "a"), ("bob", "tie")), pairwise]),
        "studio_min.json": json.dumps(
            [
                {**flat[0], "annotator": "ann", "choice": "a"},
                {**flat[0], "annotator": "bob", "choice": "tie"},
                {**flat[1], "annotator": "ann"},
                {**flat[1], "annotator": "bob", "choice": "b"},
            ]
        ),
        "argilla.json": json.dumps(records),
        "argilla.jsonl": "\n".join(map(json.dumps, [*records, argilla({"id": "i3"})])),
    }


@pytest.mark.parametrize("name", exports())
def test_every_form_of_the_same_labels_says_the_same(tmp_path, name):
    (tmp_path / name).write_text(exports()[name], encoding="utf-8")
    found = [(row["item"], row["annotator"], row["choice"]) for row in read_choices(tmp_path / name)]
    assert found == LABELS


def test_a_file_without_annotators_is_one_annotators(tmp_path):
    (tmp_path / "ann.jsonl").write_text('{"item": "i1", "choice": "a"}\n\n{"item": "i2", "choice": "b"}\n')
    assert {row["annotator"] for row in read_choices(tmp_path / "ann.jsonl")} == {"ann"}


def test_spaces_in_a_file_of_ones_own_are_no_part_of_a_name(tmp_path):
    (tmp_path / "a.csv").write_text("item,annotator,choice\ni1,a4 ,a\n i1,a4, a\ni2,a4,  \n")
    said = [(row["item"], row["annotator"], row["choice"]) for row in read_choices(tmp_path / "a.csv")]
    assert said == [("i1", "a4", "a")] * 2 + [("i2", "a4", None)]


WRONG = {
    "not UTF-8": (b'{"item": "i1", "choice": "caf\xe9"}', "is not UTF-8"),
    "empty": (b"", "holds no label"),
    "an empty list": (b"[]", "holds no label"),
    "nothing labelled": (json.dumps([studio(label_studio_tasks(QUEUE)[0])]).encode(), "holds no label"),
    "another word": (b'{"item": "i1", "choice": "first"}', "row 0, has the choice 'first', not one of a, b, tie"),
    "no item": (b'{"choice": "a"}', "row 0, has no `item`"),
    "a list": (b'["a"]', "row 0, must be an object"),
    "cut": (b'{"item": "i1", "choice": "a"}\n{"item"', "line 2, is not JSON"),
    "a cut list": (b'[{"item"', "is not JSON"),
    "no status": (b'[{"id": "i1", "responses": {"choice": [{"value": "a", "user_id": "u"}]}}]', "flatten=True"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_file_of_labels_is_refused(tmp_path, name):
    content, message = WRONG[name]
    (tmp_path / "labels.json").write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        read_choices(tmp_path / "labels.json")
    assert "\n" not in str(caught.value) and "labels.json" in str(caught.value)
