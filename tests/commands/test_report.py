"""The page of a run: what is in it, and that nothing of it comes from elsewhere."""

import html.parser
import json
import re

import pytest

from trl_ext.commands.report import main, page, read_run

LOGS = [
    {"step": step, "loss": 1 / step, "objective/kl": 0.5 * step, "objective/scores": step, "objective/scores_std": 1.0}
    for step in range(1, 10)
]
ALERT = {
    "monitor": "KLBudgetCallback",
    "what": "the KL is over its <budget>",
    "step": 7,
    "value": 3.5,
    "bound": 3.0,
    "baseline": None,
    "advice": "Stop.",
    "action": "stop",
    "runbook": "docs/runbook.md#kl",
}


@pytest.fixture
def run_dir(tmp_path):
    def write(name, rows):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    events = [{"type": "train", "step": log["step"], "logs": log} for log in LOGS]
    begin = {"type": "begin", "step": 0, "config": {"learning_rate": 0.125, "note": "<b>"}}
    write("metrics.rank0.jsonl", [begin, *events])
    with (tmp_path / "metrics.rank0.jsonl").open("a") as file:
        file.write('{"type": "train", "step": 10, "lo')  # killed here
    write("alerts.jsonl", [ALERT])
    for rank in range(2):
        write(
            f"completions.rank{rank}.jsonl",
            [
                {"step": s, "prompt": f"ask {rank}", "completion": f"<i>answer</i> {s}", "scores": {"good": s / 9}}
                for s in range(1, 10)
            ],
        )
    return tmp_path


class Page(html.parser.HTMLParser):
    """Open tags, and what they refer to."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.references, self.text = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.references += [v for k, v in attributes if k in ("src", "href", "xlink:href") and v]

    def handle_data(self, data):
        self.text += data


def test_page(run_dir):
    text = page(read_run(run_dir))
    parsed = Page(text)
    assert all(reference.startswith("#") for reference in parsed.references) and "@import" not in text
    assert not re.search(r"url\((?!#)", text)
    for part in (
        "the KL is over its <budget>",
        "<i>answer</i> 9",
        "learning_rate",
        "<b>",
        "KL to the reference, nats",
    ):
        assert part in parsed.text
    assert "script" not in parsed.tags and "prefers-color-scheme: dark" in text and "currentColor" in text
    assert parsed.tags.count("svg") >= 4 and parsed.tags.count("i") == 0  # what the model wrote is text
    for phase in ("first third", "second third", "last third"):
        assert phase in parsed.text
    assert "good: density of single scores" in text and "0.5 → 4.5" in parsed.text
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))


def test_page_of_a_run_without_our_callbacks(tmp_path):
    (tmp_path / "checkpoint-9").mkdir()
    (tmp_path / "checkpoint-9" / "trainer_state.json").write_text(json.dumps({"log_history": LOGS}))
    main([str(tmp_path)])
    parsed = Page((tmp_path / "report.html").read_text())
    assert "No completions" in parsed.text and "None." in parsed.text and "KL to the reference" in parsed.text


@pytest.mark.parametrize(("make", "message"), [(False, "is no folder"), (True, "has neither metrics.rank0.jsonl")])
def test_nothing_to_report_is_said_in_one_line(make, message, tmp_path, capsys):
    if make:
        (tmp_path / "run").mkdir()
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path / "run")])
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
