"""The queue of answers to label, its export to labelling tools, and the import of labels."""

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
    """Rows (prompt, answer, score, disagreement); scores are coarse, so that many are equal."""
    rng = random.Random(seed)
    return [
        (f"prompt {p}", f"answer {i}", rng.randrange(8) / 4, rng.random()) for p in range(prompts) for i in range(each)
    ]


def chosen(rows, seed=0):
    prompts, texts, scores, spread = (list(column) for column in zip(*rows, strict=True))
    found = answers_to_label(prompts, texts, scores, spread, 20, SHARES, seed)
    return [(*rows[row], why) for row, why in found.items()]


def test_each_part_of_the_queue_has_the_right_answers():
    rows = answers()
    queue = chosen(rows)
    assert Counter(why for *_, why in queue) == {"score": 8, "disagreement": 6, "random": 6}
    assert len({prompt for prompt, *_ in queue}) == 20  # so no answer occurs twice
    reasons = [why for *_, why in queue]
    assert reasons != sorted(reasons, key=list(SHARES).index)  # the order shows nothing to annotators

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


def test_the_queue_depends_on_the_seed_and_not_on_the_order_of_rows():
    rows = answers()
    shuffled = random.Random(1).sample(rows, len(rows))
    assert chosen(rows) == chosen(shuffled) == chosen(rows + rows)
    assert chosen(rows) != chosen(rows, seed=1)


TEXTS = {"prompt": "hi <b>", "response_a": "x", "response_b": "y & z"}
TURNS = {
    "prompt": [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}],
    "response_a": [{"role": "assistant", "content": "x"}],
    "response_b": [{"role": "assistant", "content": "y"}],
}
QUEUE = [{"item": f"i{i}", **row, "round": 2, "picked": "a", "score_a": 1.0} for i, row in ((1, TEXTS), (2, TURNS))]
SHOWN = {"prompt": "system: be kind\n\nuser: hi", "response_a": "x", "response_b": "y"}  # of the second row


def test_exports_fit_the_tools_and_have_no_scores():
    tasks = label_studio_tasks(QUEUE)
    assert tasks == [{"data": {"item": "i1", **TEXTS}}, {"data": {"item": "i2", **SHOWN}}]
    assert argilla_records(QUEUE) == [{"id": "i1", **TEXTS, "round": 2}, {"id": "i2", **SHOWN, "round": 2}]
    view = ElementTree.fromstring(LABEL_STUDIO_CONFIG)
    shown = {text.get("name"): text.get("value") for text in view.iter("Text")}
    assert shown == {name: f"${name}" for name in TEXTS}
    (choices,) = view.iter("Choices")
    assert choices.get("name") == "choice" and choices.get("toName") in shown
    assert [choice.get("value") for choice in choices] == ["a", "b", "tie"]


def studio(task, *labels):
    """A task as Label Studio exports it; labels are (annotator, choice), None for skipped."""
    return {
        "id": 1,
        **task,
        "annotations": [
            {
                "id": 7,
                "completed_by": who,
                "was_cancelled": said is None,
                # A skipped task may have an earlier choice
                "result": [{"from_name": "choice", "type": "choices", "value": {"choices": [said or "a"]}}],
            }
            for who, said in labels
        ],
    }


def argilla(record, *labels):
    people, said, status = (list(each) for each in zip(*labels, strict=True)) if labels else (None, None, None)
    name = "choice.responses"
    return {**record, "status": "completed", name: said, f"{name}.users": people, f"{name}.status": status}


LABELS = [("i1", "ann", "a"), ("i1", "bob", "tie"), ("i2", "ann", None), ("i2", "bob", "b")]


def exports():
    first, second = label_studio_tasks(QUEUE)
    one, two = argilla_records(QUEUE)
    records = [
        argilla(one, ("ann", "a", "submitted"), ("bob", "tie", "submitted")),
        argilla(two, ("ann", "a", "discarded"), ("bob", "b", "submitted")),
    ]
    own = [{"item": item, "annotator": who, "choice": said} for item, who, said in LABELS]
    comma = "item,annotator,choice\n" + "".join(f" {item},{who} ,{said or ' '}\n" for item, who, said in LABELS)
    return {
        # A line separator within a text does not end a line
        "own.jsonl": "\n".join(json.dumps({**row, "note": "\u2028"}, ensure_ascii=False) for row in own) + "\n\n",
        "own.csv": "\ufeff" + comma,
        "studio.json": json.dumps(
            [studio(first, ("ann", "a"), ("bob", "tie")), studio(second, ("ann", None), ({"email": "bob"}, "b"))]
        ),
        "argilla.json": json.dumps(records),
    }


@pytest.mark.parametrize("name", exports())
def test_all_formats_of_the_same_labels_are_read_the_same(tmp_path, name):
    (tmp_path / name).write_text(exports()[name], encoding="utf-8")
    found = [(row["item"], row["annotator"], row["choice"]) for row in read_choices(tmp_path / name)]
    assert found == LABELS


@pytest.mark.parametrize(
    "content, message",
    [
        ('{"item": "i1", "choice": "first"}', "row 0, has the item 'i1' and the choice 'first', but it needs an item"),
        ('{"item": "i1", "choice": "a"}\n{"item"', "Expecting"),
    ],
)
def test_no_label_is_dropped_in_silence(tmp_path, content, message):
    (tmp_path / "labels.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        read_choices(tmp_path / "labels.json")
