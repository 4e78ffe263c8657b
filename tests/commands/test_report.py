"""The page of a run: what is in it, and that nothing of it comes from elsewhere."""

import html.parser
import json
import os
import re
import xml.etree.ElementTree

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.callbacks.replay import Replay
from tests.tiny import length_reward, prompts, tiny_config, tiny_llama, tiny_tokenizer
from trl_ext import PPOTrainer
from trl_ext.callbacks import (
    Alert,
    JSONLCallback,
    KLBudgetCallback,
    MonitoringPlotCallback,
    PrometheusCallback,
)
from trl_ext.callbacks.monitor import REGISTRY
from trl_ext.commands.report import main, page, read_run, record_run, report_of
from trl_ext.jsonl import read_jsonl
from trl_ext.metrics import series
from trl_ext.rewards.watch import Watch

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
        self.tags, self.ends, self.references, self.text = [], [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.references += [v for k, v in attributes if k in ("src", "href", "xlink:href") and v]

    def handle_endtag(self, tag):
        self.ends.append(tag)

    def handle_data(self, data):
        self.text += data


@pytest.fixture(autouse=True)
def no_default_folder(monkeypatch):
    monkeypatch.setattr(Watch, "default_folder", None)


def test_a_number_that_was_logged_once_is_not_written_as_a_change(run_dir):
    run = read_run(run_dir)
    run.history = run.history[:1]
    assert "<b>0.5</b>" in page(run) and "→" not in page(run)


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


def events(run, start, steps, begun, kl=1.0):
    """What JSONLCallback writes of a run from step `start`, at the time `begun`, which logs `steps`."""
    config = {"model_init_kwargs": {"token": "secret"}, "run_name": run}
    yield {
        "timestamp": begun,
        "type": "begin",
        "step": start,
        "run": run,
        "config": config,
        "config_class": "PPOConfig",
    }
    for step in steps:
        yield {"timestamp": begun + step, "type": "train", "step": step, "logs": {"objective/kl": kl, "loss": 0.0}}


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_last_run_of_a_folder_is_shown_and_what_was_done_again_counts_once(tmp_path):
    """The first run gave up at step 9. The second was killed at step 6, resumed from step 4, and is at step 7."""
    begun, resumed = 1000.0, 2000.0
    lines = [*events("first", 0, range(1, 10), 100.0), *events("second", 0, range(1, 7), begun, kl=2.0)]
    lines += events("second", 4, range(5, 8), resumed, kl=3.0)
    write_lines(tmp_path / "metrics.rank0.jsonl", lines)
    old, kept, undone, notice = (
        {**ALERT, "what": what, "step": step, "timestamp": at}
        for what, step, at in (
            ("old", 3, 103.0),
            ("kept", 3, begun + 3),
            ("undone", 6, begun + 6),
            ("nothing to watch: no key", 7, resumed + 7),
        )
    )
    notice["level"] = "notice"
    write_lines(tmp_path / "alerts.jsonl", [old, kept, undone, notice])
    rows = [(f"answer {at:.0f} {step}", step, at + step) for at in (100.0, begun) for step in (0, 6)]
    write_lines(
        tmp_path / "completions.rank0.jsonl",
        [{"prompt": "p", "completion": c, "step": s, "timestamp": at, "scores": {"good": 1.0}} for c, s, at in rows],
    )
    (tmp_path / "checkpoint-9").mkdir()
    state = {"log_history": LOGS, "stateful_callbacks": {REGISTRY: {"KLBudgetCallback": {"args": {"limit": 77}}}}}
    (tmp_path / "checkpoint-9" / "trainer_state.json").write_text(json.dumps(state))
    os.utime(tmp_path / "checkpoint-9" / "trainer_state.json", (109, 109))  # of the first run

    run = read_run(tmp_path)
    assert [log["step"] for log in run.history] == [1, 2, 3, 4, 5, 6, 7] and run.last_step == 7
    assert series(run.history, "objective/kl")[1] == [2.0] * 4 + [3.0] * 3
    assert [alert["what"] for alert in run.alerts] == ["kept", "nothing to watch: no key"] and run.registry == {}
    assert [row["completion"] for row in run.samples] == ["answer 1000 0"]
    text = page(run)
    assert "PPOConfig, run second" in text and "resumed at step 4" in text and "run first" not in text
    assert "secret" not in text and "&lt;redacted&gt;" in text
    tiles = dict(re.findall(r'class="tile">([^<]*)<b>([^<]*)', text))
    assert (tiles["steps"], tiles["alerts"], tiles["notices of monitors"]) == ("7", "1", "1")


def test_an_alert_is_linked_to_what_to_do_within_the_page(run_dir):
    parsed = Page(page(read_run(run_dir)))
    assert "#runbook-kl" in parsed.references and "Compare completions of now" in parsed.text
    ids = re.findall(r'\bid="([^"]+)"', page(read_run(run_dir)))
    assert {reference[1:] for reference in parsed.references} <= set(ids)


def test_a_run_without_completions_has_no_empty_sections(tmp_path):
    rows = [{**event, "config_class": "SFTConfig"} for event in events("a", 0, (), 1.0)]
    rows += [{"type": "train", "step": step, "logs": {"entropy": 1.0, "loss": 0.5}} for step in (1, 2)]
    write_lines(tmp_path / "metrics.rank0.jsonl", rows)
    text = Page(page(read_run(tmp_path))).text
    assert "Samples" not in text and "Scores by phase" not in text and "2 settings" in text


def test_without_matplotlib_the_page_says_so_in_a_sentence(run_dir, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    text = page(read_run(run_dir))
    assert "No curves: <code>pip install matplotlib</code>" in text and "answer" in text and "<svg" not in text


def test_report_at_the_end_of_a_script(run_dir, tmp_path_factory):
    nothing = tmp_path_factory.mktemp("nothing")
    assert report_of(run_dir, was_trained=False) == "No report: nothing was trained"
    assert not (run_dir / "report.html").exists()
    assert report_of(run_dir) == f"Report: {run_dir / 'report.html'}"
    before = (run_dir / "report.html").stat().st_mtime_ns
    assert report_of(run_dir, was_trained=False) == f"Report: {run_dir / 'report.html'}"
    assert (run_dir / "report.html").stat().st_mtime_ns == before
    assert report_of(nothing).startswith(f"No report: {nothing} has neither metrics.rank0.jsonl")


def test_a_run_that_a_monitor_stopped_has_its_page(tmp_path, monkeypatch):
    trainer = PPOTrainer(
        model=tiny_llama(),
        reward_funcs=length_reward,
        args=tiny_config(tmp_path, max_steps=40, learning_rate=0.1),
        train_dataset=prompts(),
        processing_class=tiny_tokenizer(),
        callbacks=[KLBudgetCallback(warn=0.01, limit=0.01, action="stop")],
    )
    record_run(trainer, samples=True)
    trainer.train()
    assert trainer.state.global_step < 40
    text = (tmp_path / "report.html").read_text()
    assert "the KL is over its budget" in text and "length_reward: density of single scores" in text
    assert text.count("<tr>") > 8  # alerts, and samples of the rollouts until then


HOSTILE = [
    "$",
    "$x^",
    "a_$\\frac{",
    "_hidden",
    "100% %s %(x)d {0} {",
    "\\n\\u12 \\",
    "</text></svg><script>alert(1)</script>",
    "--><img src=x onerror=alert(1)>",
    "]]>&amp;&#0;&lt",
    '" onmouseover="x" id="',
    "url(#x) #010203",
    "日本語 العربية 🙂 \N{COMBINING ACUTE ACCENT}" * 3,
    "\ud83d half",
    "\0\x07\x1b[31m\x7f\x85",
    "line\nbreak\r\ttab\u2028\u2029",
    "long" * 2000,
    'label{a="b"} 1\n# HELP x',
    "",
]


@pytest.mark.slow
def test_names_and_texts_from_outside_spoil_nothing(tmp_path):
    """Rewards, prompts, completions, alerts, settings and folders: in JSON lines, page, picture and Prometheus."""
    folder = tmp_path / "a <b> $x_ %s '\" & 日本"
    args = tiny_config(folder, run_name=HOSTILE[6], stop_token_id=5)
    exporter = PrometheusCallback(textfile=str(tmp_path / "run.prom"))
    run = Replay(args, KLBudgetCallback(sinks=["jsonl"]), JSONLCallback(), exporter, MonitoringPlotCallback())
    for step in range(1, 4):
        run.log(
            step, logs={f"rewards/{text}/mean": float(step) for text in HOSTILE} | {"objective/kl": 1.0, "loss": 0.1}
        )
    for text in HOSTILE:
        Watch().write_rows([text], [text], [{text: 1.0, "huge": 1e308, "nan": float("nan")}], 1)
        run.callbacks[0]._send(Alert(text, text, 2, 1.0, None, None, text, "warn", text), run.state)
    run.fire("on_train_end")

    assert [row["prompt"] for row in read_jsonl(folder / "completions.rank0.jsonl")] == HOSTILE
    assert report_of(folder) == f"Report: {folder / 'report.html'}"
    assert (folder / "rlhf_monitoring.png").stat().st_size > 10_000
    text = (folder / "report.html").read_text(encoding="utf-8")
    parsed = Page(text)
    assert not {"script", "img", "b-", "i"} & set(parsed.tags) and not re.search(r"<[^>]*\son\w+=", text)
    assert parsed.tags.count("svg") == parsed.ends.count("svg") == 3 + len(HOSTILE)  # each reward has a density
    assert parsed.ends.count("html") == 1 and parsed.ends[-1] == "html"  # the page goes to its end
    assert "$x^" in text and "100% %s %(x)d" in text and HOSTILE[6] in parsed.text and "url(#x) #010203" in parsed.text
    assert not re.search("[\0-\b\x0e-\x1f\x7f-\x9f]", text)
    ids = re.findall(r'<[^>]*\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        xml.etree.ElementTree.fromstring(svg)

    exported = list(text_string_to_metric_families((tmp_path / "run.prom").read_text(encoding="utf-8")))
    logged = {s.labels["key"]: s.value for family in exported if family.name == "trl_ext_log" for s in family.samples}
    assert sum(value == 3.0 for value in logged.values()) == len(HOSTILE)
    assert {f"rewards/{text}/mean" for text in HOSTILE if text.isprintable()} < logged.keys()


@pytest.mark.parametrize(("make", "message"), [(False, "is no folder"), (True, "has neither metrics.rank0.jsonl")])
def test_nothing_to_report_is_said_in_one_line(make, message, tmp_path, capsys):
    if make:
        (tmp_path / "run").mkdir()
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path / "run")])
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
