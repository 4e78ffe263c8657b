"""The page of a run: what is in it, and that nothing of it comes from elsewhere."""

import html
import html.parser
import json
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree

import pytest
from jinja2 import UndefinedError
from markupsafe import Markup
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
    record_run,
)
from trl_ext.callbacks.metrics import curve
from trl_ext.callbacks.monitor import REGISTRY
from trl_ext.rewards.watches.watch import Watch
from trl_ext.runs.jsonl import read_jsonl
from trl_ext.workbench.pages.markup import render, with_error
from trl_ext.workbench.pages.report import main, page, read_run, report_of, write_report

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
        self.tags, self.ends, self.references, self.attributes, self.text = [], [], [], set(), ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attributes}
        self.references += [v for k, v in attributes if k in ("src", "href", "xlink:href") and v]

    def handle_endtag(self, tag):
        self.ends.append(tag)

    def handle_data(self, data):
        self.text += data


@pytest.mark.slow
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
    assert (
        "No completions" in parsed.text
        and "No monitors were set." in parsed.text
        and "KL to the reference" in parsed.text
    )


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
    assert curve(run.history, "objective/kl")[1] == [2.0] * 4 + [3.0] * 3
    assert [alert["what"] for alert in run.alerts] == ["kept", "nothing to watch: no key"] and run.registry == {}
    assert [row["completion"] for row in run.samples] == ["answer 1000 0"]
    text = page(run)
    assert "PPOConfig, run second" in text and "resumed at step 4" in text and "run first" not in text
    assert "secret" not in text and "&lt;redacted&gt;" in text
    tiles = dict(re.findall(r'class="tile">([^<]*)<b>([^<]*)', text))
    assert (tiles["steps"], tiles["alerts"], tiles["notices of monitors"]) == ("7", "1", "1")


@pytest.mark.slow
def test_an_alert_is_linked_to_what_to_do_within_the_page(run_dir):
    parsed = Page(page(read_run(run_dir)))
    assert "#runbook-kl" in parsed.references and "Are completions better than in the first rollouts" in parsed.text
    ids = re.findall(r'\bid="([^"]+)"', page(read_run(run_dir)))
    assert {reference[1:] for reference in parsed.references} <= set(ids)


@pytest.mark.slow
def test_a_run_without_completions_has_no_empty_sections(tmp_path):
    rows = [{**event, "config_class": "SFTConfig"} for event in events("a", 0, (), 1.0)]
    rows += [{"type": "train", "step": step, "logs": {"entropy": 1.0, "loss": 0.5}} for step in (1, 2)]
    write_lines(tmp_path / "metrics.rank0.jsonl", rows)
    text = Page(page(read_run(tmp_path))).text
    assert "Samples" not in text and "Scores by phase" not in text and "2 settings" in text
    config = {"record_answers": 0}
    runs = [
        write_run(tmp_path / name, LOGS, "SFTConfig", config, samples=samples)
        for name, samples in (("quiet", []), ("said", [answer("p", "x", 1)]))
    ]
    text = Page(write_report(runs[0], tmp_path / "page.html").read_text()).text
    assert "No answers were recorded: set record_answers: 4" in text
    assert "No answers were recorded of quiet" in Page(write_report(runs, tmp_path / "page.html").read_text()).text


def test_without_matplotlib_the_page_says_so_in_a_sentence(run_dir, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    text = page(read_run(run_dir))
    assert (
        "There are no curves: run <code>pip install matplotlib</code>" in text
        and "answer" in text
        and "<svg" not in text
    )


def test_report_at_the_end_of_a_script(run_dir, tmp_path_factory):
    nothing = tmp_path_factory.mktemp("nothing")
    assert report_of(run_dir, was_trained=False) == "No report: nothing was trained"
    assert not (run_dir / "report.html").exists()
    assert report_of(run_dir) == f"Report: {run_dir / 'report.html'}"
    before = (run_dir / "report.html").stat().st_mtime_ns
    assert report_of(run_dir, was_trained=False) == f"Report: {run_dir / 'report.html'}"
    assert (run_dir / "report.html").stat().st_mtime_ns == before
    assert report_of(nothing).startswith(f"No report: {nothing} has neither metrics.rank0.jsonl")


@pytest.mark.slow
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
    assert not {"script", "img", "b-", "i"} & set(parsed.tags) and "role" in parsed.attributes
    assert not [name for name in parsed.attributes if name.startswith("on")]
    assert parsed.tags.count("svg") == parsed.ends.count("svg") == 3 + len(HOSTILE)  # each reward has a density
    assert parsed.ends.count("html") == 1 and parsed.ends[-1] == "html"  # the page goes to its end
    assert "$x^" in text and "100% %s %(x)d" in text and HOSTILE[6] in parsed.text and "url(#x) #010203" in parsed.text
    assert not re.search("[\0-\b\x0e-\x1f\x7f-\x9f]", text)
    ids = re.findall(r'<[^>]*\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        xml.etree.ElementTree.fromstring(svg)

    beside = shutil.copytree(folder, tmp_path / "<script>alert(1)" / "<b>td")
    together = write_report([folder, beside], tmp_path / "together.html").read_text(encoding="utf-8")
    tags = Page(together)
    assert not {"script", "img", "b"} & set(tags.tags) and tags.text.count("<b>td") > 3 and "$x^" in together
    assert not [name for name in tags.attributes if name.startswith("on")]
    ids = re.findall(r'<[^>]*\bid="([^"]+)"', together)
    assert len(ids) == len(set(ids))

    exported = list(text_string_to_metric_families((tmp_path / "run.prom").read_text(encoding="utf-8")))
    logged = {s.labels["key"]: s.value for family in exported if family.name == "trl_ext_log" for s in family.samples}
    assert sum(value == 3.0 for value in logged.values()) == len(HOSTILE)
    assert {f"rewards/{text}/mean" for text in HOSTILE if text.isprintable()} < logged.keys()


@pytest.mark.slow
def test_an_episode_is_shown_turn_by_turn(tmp_path):
    """Thought, text, call, answer, in order and escaped; what is long and what is in the middle is folded."""

    def called(name, given):
        return {
            "role": "assistant",
            "tool_calls": [{"type": "function", "function": {"name": name, "arguments": given}}],
        }

    look = {**called("look", {}), "content": "I <b>look</b>.", "reasoning_content": "Where am I?"}
    wall = {"role": "tool", "name": "look", "content": "a <i>wall</i>\n" * 9}
    failed = {"role": "tool", "name": "go", "content": "{'error': 'no such tool'}"}
    episode = [look, wall, called("go", {"to": "left", "by": [1]}), failed]
    episode += [called("add", [n]) for n in range(6)] + [{"role": "assistant", "content": "Done."}]
    samples = [answer("p", episode, 5), answer("q", "flat\ntext", 6), answer("p", episode, 5)]
    page_of = write_report(write_run(tmp_path / "run", LOGS, samples=samples)).read_text()
    parsed = Page(page_of)
    shown = ["Where am I?", "I <b>look</b>.", "look()", "look said", "a <i>wall</i>", 'go(to="left", by=[1])']
    shown += ["go said", "no such tool", "4 more", "add([0])", "add([5])", "Done."]
    places = [parsed.text.index(part) for part in shown]
    assert places == sorted(places) and not {"i", "script"} & {*parsed.tags} and "flat\ntext" in parsed.text
    assert (
        page_of.count('class="turn fails"') == 1 and page_of.count("a &lt;i&gt;wall&lt;/i&gt;") == 10
    )  # and a summary
    beside = write_run(tmp_path / "beside", LOGS, samples=samples)
    together = write_report([tmp_path / "run", beside], tmp_path / "together.html").read_text()
    assert together.count('class="turn fails"') == 2 and together.count("4 more") == 2


@pytest.mark.parametrize(("make", "message"), [(False, "is not a folder"), (True, "has neither metrics.rank0.jsonl")])
def test_nothing_to_report_is_said_in_one_line(make, message, tmp_path, capsys):
    if make:
        (tmp_path / "run").mkdir()
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path / "run")])
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def write_run(folder, logs, config_class="PPOConfig", config=(), alerts=(), samples=()):
    """What JSONLCallback, the monitors and SamplesCallback write of a run that ended."""
    folder.mkdir(parents=True)
    begin = {"type": "begin", "step": 0, "run": folder.name, "config": dict(config), "config_class": config_class}
    rows = [{"type": "train", "step": log["step"], "logs": log} for log in logs]
    write_lines(folder / "metrics.rank0.jsonl", [begin, *rows, {"type": "end", "step": len(logs), "logs": {}}])
    write_lines(folder / "alerts.jsonl", alerts)
    write_lines(folder / "completions.rank0.jsonl", samples)
    return folder


def answer(prompt, completion, step):
    return {"prompt": prompt, "completion": completion, "step": step, "scores": {"good": 0.5}}


@pytest.fixture
def two_runs(tmp_path):
    """PPO with and without a KL penalty, whose batches are of different sizes, in folders of one name."""
    config = {"learning_rate": 0.125, "kl_coef": 0.1, "output_dir": "a"}
    logs = [{**log, "episode": 8 * log["step"]} for log in LOGS]
    samples = [answer("both", "old <b>", 1), answer("both", "good <b>", 9), answer("only here", "x", 9)]
    first = write_run(tmp_path / "a" / "ppo", logs, config=config, samples=samples)
    logs = [{**log, "objective/kl": 9.0 * log["step"], "episode": 16 * log["step"]} for log in LOGS[:5]]
    config |= {"kl_coef": 0.0, "output_dir": "b"}
    samples = [answer("both", "worse", 5)]
    second = write_run(tmp_path / "b" / "ppo", logs, config=config, alerts=[ALERT, ALERT], samples=samples)
    return first, second


def test_several_runs_on_one_page(two_runs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main([str(folder) for folder in two_runs])
    assert capsys.readouterr().out == "comparison.html\n"  # in the folder that both runs are in
    text = (tmp_path / "comparison.html").read_text()
    parsed = Page(text)
    rows = [re.findall(r'data-name="([^"]*)">(.*?)</td>', row) for row in re.findall(r"<tr>(.*?)</tr>", text, re.S)]
    summary = {row[0][1]: dict(row[1:]) for row in rows if row and row[0][0] == "first → last"}
    assert summary["KL, nats per response"] == {"a/ppo": "0.5 → 4.5", "b/ppo": "9 → 45"}
    assert summary["alerts"] == {"a/ppo": "0", "b/ppo": "2"} and summary["steps"] == {"a/ppo": "9", "b/ppo": "5"}
    differing = [dict(row) for row in rows if row and row[0][0] == "setting"]
    assert differing == [{"setting": "kl_coef", "a/ppo": "0.1", "b/ppo": "0.0"}]
    (sample,) = [dict(row) for row in rows if row and row[0][0] == "prompt"]
    assert sample["prompt"] == "both" and sample["a/ppo"].startswith("good &lt;b&gt;") and "worse" in sample["b/ppo"]
    (kl,) = re.findall(r'<figure><svg role="img" aria-label="KL, nats per response".*?</figure>', text, re.S)
    assert {"#0072b2", "#d55e00"} <= set(re.findall(r"stroke: (#\w{6})", kl)) and kl.count("ppo</text>") == 2
    assert parsed.text.count("the KL is over its <budget>") == 2 and "--x episode" in parsed.text
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids)) and all(reference.startswith("#") for reference in parsed.references)


@pytest.mark.slow
def test_an_evaluation_of_the_runs_has_its_rows(two_runs, tmp_path, capsys):
    mean = {"mean": 1.5, "standard_error": None, "count": 1}
    wins = {"length": {"win_rate": 0.75, "interval": [0.5, 1.0]}}
    of = {
        "rewards": {"length": mean},
        "kl": None,
        "length": mean,
        "cut_off": 0.25,
        "distinct_3": None,
        "repeated": 0.0,
    }
    policies = {
        "<x>": {**of, "policy": str(two_runs[1] / "checkpoint-5"), "win_rates": wins},
        "base": {**of, "policy": "base", "win_rates": {}},
    }
    found = {"prompts": 1, "baseline": "base", "notes": ["Not checked: <x>"], "policies": policies}
    (tmp_path / "evaluation.json").write_text(json.dumps(found))
    words = [*map(str, two_runs), "--output", str(tmp_path / "page.html"), "--evaluation"]
    main([*words, str(tmp_path)])
    text = Page((tmp_path / "page.html").read_text()).text
    assert "wins by length–75.0% (50.0% to 100.0%)" in text and "Not checked: <x>" in text
    assert "The score is highest in a/ppo" in text  # the evaluation is of one run alone
    policies["a"] = {**policies["base"], "policy": str(two_runs[0]), "rewards": {"length": {**mean, "mean": 0.5}}}
    (tmp_path / "evaluation.json").write_text(json.dumps(found))
    main([*words, str(tmp_path)])
    said = "The evaluation's score by length is highest in b/ppo (1.5) and lowest in a/ppo (0.5); "
    assert begins_with((tmp_path / "page.html").read_text()).startswith(said)
    (tmp_path / "evaluation.json").write_text(json.dumps({**found, "policies": {"base": policies["base"]}}))
    for given, why in ((tmp_path, "none of these runs"), (tmp_path / "none", "cannot be read as an evaluation")):
        with pytest.raises(SystemExit):
            main([*words, str(given)])
        assert why in capsys.readouterr().err


@pytest.mark.slow
def test_over_episodes_a_step_of_more_of_them_goes_further(two_runs, tmp_path):
    furthest = []
    for x, label in (("step", "optimizer step"), ("episode", "episode")):
        main([*map(str, two_runs), "--x", x, "--output", str(tmp_path / "page.html")])
        text = (tmp_path / "page.html").read_text()
        (score,) = re.findall(r'aria-label="score".*?</svg>', text, re.S)
        assert set(re.findall(r">(optimizer step|episode)</text>", text)) == {label}
        furthest.append(max(map(float, re.findall(r">(\d+)</text>", score))))
    assert furthest[0] < 12 and furthest[1] >= 60  # 9 steps of 8 episodes, and 5 of 16
    assert "<code>--x" not in text


def test_no_credential_of_a_monitor_is_shown_beside_another_run(two_runs, tmp_path):
    for folder, secret in zip(two_runs, ("T0/first", "T0/second"), strict=True):
        hook = {"sinks": [f"https://hooks.slack.com/services/{secret}"], "limit": float(len(secret))}
        with open(folder / "metrics.rank0.jsonl", "a") as file:
            log = {"type": "train", "step": 9, "logs": {"loss": 1.0}, "monitors": {"KLBudgetCallback": hook}}
            file.write(f"{json.dumps(log)}\n")
    text = write_report(two_runs, tmp_path / "page.html").read_text()
    assert "KLBudgetCallback" in text and "&lt;redacted&gt;" in text and "T0/" not in text


@pytest.mark.parametrize("name", ["setting", "prompt", "first → last"])
def test_a_run_may_be_called_as_a_column_of_the_page(name, tmp_path):
    runs = [
        write_run(tmp_path / each, LOGS, config={"output_dir": each, "beta": beta}, samples=[answer("p", each, 1)])
        for each, beta in ((name, 0.1), ("other", 0.2))
    ]
    text = write_report(runs, tmp_path / "page.html").read_text()
    assert text.count(f'data-name="{name}"') >= 3  # its own cells, in each of three tables


@pytest.mark.slow
def test_runs_of_different_trainers_and_the_rounds_of_online_dpo(two_runs, tmp_path):
    logs = [{"step": step, "rewards/margins": 0.1 * step, "rewards/accuracies": 0.5, "beta": 0.1} for step in (1, 2)]
    for number in (1, 2):
        folder = write_run(tmp_path / "online" / f"round-{number}", logs, "DPOConfig", {"beta": number})
        (folder / "round.json").write_text(json.dumps({"held_out": {"gold": number / 8}, "length": 20}))
    main([str(two_runs[0]), str(tmp_path / "online" / "round-1"), "--output", str(tmp_path / "page.html")])
    text = Page((tmp_path / "page.html").read_text()).text
    write_report([two_runs[0], tmp_path / "online"], tmp_path / "all.html")
    assert "round-2" in (tmp_path / "all.html").read_text()
    assert "pair accuracy" in text and "KL, nats per response" in text and "DPOConfig" in text
    assert "3 settings that only some of these trainers have" in text and "kl_coef0.1–" in text
    assert report_of(tmp_path / "online") == f"Report: {tmp_path / 'online' / 'report.html'}"
    text = Page((tmp_path / "online" / "report.html").read_text()).text
    assert "round-1round-2" in text.replace(" ", "") and "held-out gold0.1250.25" in text


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["a/ppo", "b"], "b is not a run, but contains some: give one or several of b/ppo"),
        (["a/ppo", "c"], "c is not a folder"),
        (["a/ppo", "a/../a/ppo"], "is given twice"),
        (["a/ppo", "b/ppo", "--x", "epsiode"], "no 'epsiode' in its logs"),
        (["a/ppo", "--x", "episode"], "is for several runs"),
        (["a/ppo", "--evaluation", "x"], "`--evaluation x` is for several runs"),
        (["begun"], "has logged nothing"),
    ],
)
def test_what_cannot_be_compared_is_said_in_one_line(given, message, two_runs, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "b").mkdir(exist_ok=True)
    (tmp_path / "begun").mkdir()
    write_lines(tmp_path / "begun" / "metrics.rank0.jsonl", [{"type": "begin", "step": 0}])
    with pytest.raises(SystemExit, match="2"):
        main(given)
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config_class", "log", "first", "value"),
    [
        ("SFTConfig", {"loss": 0.5, "mean_token_accuracy": 0.8}, "loss, nats per token", "0.5"),
        ("DPOConfig", {"loss": 0.6, "rewards/accuracies": 0.7, "rewards/margins": 0.2}, "pair accuracy", "0.7"),
        ("RewardConfig", {"loss": 0.6, "accuracy": 0.9, "margin": 2.0}, "pair accuracy", "0.9"),
        ("PPOConfig", {"objective/scores": 1.5, "objective/kl": "nan", "entropy": 1.0}, "score", "1.5"),
        ("OfAnother", {"loss": 0.6, "rewards/accuracies": 0.7, "rewards/margins": 0.2}, "pair accuracy", "0.7"),
    ],
)
def test_the_first_tile_is_what_the_trainers_reader_asks_first(config_class, log, first, value, tmp_path):
    text = page(read_run(write_run(tmp_path / "run", [{"step": 1, **log}], config_class)))
    found = re.findall(r'class="tile">([^<]*)<b>([^<]*)', text)
    assert found[0] == (first, value) and found[-2:] == [("steps", "1"), ("alerts", "0")]
    assert ("KL, nats per response", "nan") in found or "objective/kl" not in log


def begins_with(text):
    return html.unescape(re.search(r'<h1>[^<]*</h1><p class="verdict">([^<]*)</p>', text)[1])


def alert(monitor, action, step, level="alert"):
    return {**ALERT, "monitor": monitor, "action": action, "step": step, "level": level}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("monitors", "alerts", "said", "section"),
    [
        ({}, [], "no monitors were set", "No monitors were set."),
        (None, [], "", "No alert is recorded, nor which monitors were set."),
        ({"B": {}, "A": {}}, [], "A and B watched and found nothing", "A and B watched and found nothing."),
        (
            dict.fromkeys("ABCD", {}),
            [],
            "4 monitors watched and found nothing",
            "4 monitors watched and found nothing.",
        ),
        ({"A": {}}, [alert("A", "warn", 3, "notice")], "A watched and found nothing", ""),
        ({"A": {}}, [alert("A", "warn", 3), alert("A", "stop", 7)], "A stopped the run at step 7", ""),
        (
            {"A": {}, "<B>": {}},
            [alert("A", "warn", 3), alert("<B>", "raise_kl", 5)],
            "<B> raised the KL coefficient at step 5 and A warned at step 3",
            "",
        ),
    ],
)
def test_a_page_begins_with_what_became_of_the_run_and_who_watched_it(monitors, alerts, said, section, tmp_path):
    folder = write_run(tmp_path / "run", LOGS, alerts=alerts)
    if monitors is not None:
        with (folder / "metrics.rank0.jsonl").open("a") as file:
            file.write(json.dumps({"type": "train", "step": 9, "logs": LOGS[-1], "monitors": monitors}) + "\n")
    text = page(read_run(folder))
    rose = "The score rose from 1 to 9 and the KL rose from 0.5 to 4.5 nats per response"
    assert begins_with(text) == "; ".join(filter(None, [rose, said])) + "."
    assert section in Page(text).text


@pytest.mark.slow
def test_a_verdict_is_on_what_was_measured_alone(tmp_path):
    logs = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": "nan"}]
    assert begins_with(page(read_run(write_run(tmp_path / "sft", logs, "SFTConfig")))) == "The loss ended as nan."
    once = [{"step": 1, "objective/scores": 0.5, "eval_gold/mean": 0.25}]
    said = "The score was 0.5 (measured once) and the held-out gold was 0.25 (measured once)."
    assert begins_with(page(read_run(write_run(tmp_path / "ppo", once)))) == said
    for place, (scores, what) in enumerate([((0.1, 0.3, -0.2, 0.2), "hardly changed (0.1 to 0.2)"),
                                            ((0.1, 0.12, 0.16, 0.2), "rose from 0.1 to 0.2")]):  # fmt: skip
        logs = [{"step": step, "objective/scores": score} for step, score in enumerate(scores, 1)]
        assert begins_with(page(read_run(write_run(tmp_path / f"noise-{place}", logs)))) == f"The score {what}."
    logs = [{"step": step, "eval_accuracy": 0.5 + step / 8, "eval_loss": 0.5 * step} for step in (1, 2)]
    said = "The held-out pair accuracy rose from 0.625 to 0.75 and the held-out loss rose from 0.5 to 1."
    assert begins_with(page(read_run(write_run(tmp_path / "pairs", logs, "RewardConfig")))) == said
    for share, said in ((0.96, "The score was 1 (measured once); 96% of the last answers were cut off."),
                        (0.9, "The score was 1 (measured once).")):  # fmt: skip
        logs = [{"step": 1, "objective/scores": 1.0, "completions/clipped_ratio": share}]
        assert begins_with(page(read_run(write_run(tmp_path / f"cut-{share}", logs)))) == said
    nothing = write_run(tmp_path / "nothing", [{"step": 1, "episode": 8}])
    assert 'class="verdict"' not in page(read_run(nothing))
    lines = [*events("killed", 0, (1, 2), 1.0)]
    (tmp_path / "killed").mkdir()
    write_lines(tmp_path / "killed" / "metrics.rank0.jsonl", lines)
    assert begins_with(page(read_run(tmp_path / "killed"))) == (
        "So far the KL ended where it began, at 1 nats per response."
    )


@pytest.mark.slow
def test_the_page_of_a_reward_model_says_no_where_its_report_does(tmp_path):
    folder = write_run(tmp_path / "reward", [{"step": 1, "accuracy": 0.9, "eval_accuracy": 0.6}], "RewardConfig")
    for passed, said in ((True, "passed"), (False, "did not pass")):
        verdict = {"passed": passed, "reasons": [] if passed else ["it likes <i>"]}
        report = {"accuracy": 0.6, "verdict": verdict, "trained_on": {"is_known": passed}}
        (folder / "reward_report.json").write_text(json.dumps(report))
        text = page(read_run(folder))
        assert ("held-out accuracy, as saved" in text) is passed  # not where it may have been trained on
        assert begins_with(text).endswith(f" (measured once); the saved model {said} its report.")
        assert ("Not passed: " in text and "<li>it likes &lt;i&gt;</li>" in text) is not passed
    begun = {"type": "begin", "step": 0, "run": "again", "timestamp": 1e11, "config_class": "RewardConfig"}
    log = {"type": "train", "step": 1, "timestamp": 1e11 + 1, "logs": {"accuracy": 0.5}}
    write_lines(folder / "metrics.rank0.jsonl", [begun, log])
    assert "Not passed" not in page(read_run(folder))  # that was the report on the model before


def test_a_comparison_begins_with_who_came_out_highest_and_whom_nobody_watched(two_runs, tmp_path):
    with (two_runs[1] / "metrics.rank0.jsonl").open("a") as file:
        file.write(json.dumps({"type": "train", "step": 5, "logs": LOGS[4], "monitors": {}}) + "\n")
    assert begins_with(write_report(two_runs, tmp_path / "page.html").read_text()) == (
        "The score is highest in a/ppo (9) and lowest in b/ppo (5); the KL is highest in a/ppo (4.5) and lowest in "
        "b/ppo (2.5); in b/ppo KLBudgetCallback stopped the run at step 7; no monitors were set in b/ppo."
    )


@pytest.mark.slow
def test_a_page_needs_no_torch(run_dir):
    code = "import sys; from trl_ext.cli.main import main; main(sys.argv[1:]); print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code, "report", str(run_dir)], capture_output=True, text=True)
    where, modules = ran.stdout.splitlines()
    assert where == str(run_dir / "report.html") and "<svg" in (run_dir / "report.html").read_text()
    assert not {"torch", "transformers", "trl", "accelerate", "datasets"} & {*modules.split()}


def test_a_folder_of_runs_is_no_run(run_dir, tmp_path_factory, capsys):
    folder = tmp_path_factory.mktemp("runs")
    for name in "ab":
        shutil.copytree(run_dir, folder / name)
    with pytest.raises(SystemExit):
        main([str(folder)])
    assert f"is not a run, but contains some: give one or several of {folder}/a, {folder}/b" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("value", "error", "shown"),
    [
        (0.472312, 0.0123, "0.472 ± 0.012"),
        (0.5, 0.0996, "0.50 ± 0.10"),
        (1234.5678, 120.3, "1,235 ± 120"),
        (1.5, None, "1.5"),
        (2.0, 0.0, "2 ± 0"),
        (float("nan"), float("nan"), "nan ± nan"),
    ],
)
def test_a_value_has_the_digits_that_its_error_leaves(value, error, shown):
    assert with_error(value, error) == shown


def test_a_template_escapes_all_but_html_of_ours(tmp_path):
    (tmp_path / "any.j2").write_text("{{ text }} {{ drawing }} {{ text | code }} {{ text | prose }}")
    shown = render(tmp_path / "any.j2", text="`a` <i>", drawing=Markup("<svg>"))
    assert shown == "`a` &lt;i&gt; <svg> <code>a</code> &lt;i&gt; <code>a</code> &lt;i&gt;"
    with pytest.raises(UndefinedError, match="missing"):
        (tmp_path / "any.j2").write_text("{{ missing }}")
        render(tmp_path / "any.j2")


@pytest.mark.slow
def test_metrics_of_ones_own_are_drawn_and_others_are_not_taken_for_them(tmp_path):
    own = {"mine/words": 1.0, "eval_mine/words": 2.0, "<b>/x": 1.0, "alone": 1.0}
    own |= {f"many/{n}": 1.0 for n in range(9)} | {f"z{n:02}/x": 1.0 for n in range(9)}
    folder = write_run(tmp_path / "run", [{**log, **own} for log in LOGS])
    text = write_report(folder).read_text()
    titles = re.findall(r'<svg role="img" aria-label="([^"]*)"', text)
    first = titles.index("&lt;b&gt;")  # own ones come last
    expected = ["&lt;b&gt;", "eval_mine", "many (the first 8 of 9)", "mine", *(f"z{n:02}" for n in range(7))]
    assert titles[first:] == [*expected, "z07 (and 1 more groups are not drawn)"] and "<b>/x" not in text


@pytest.mark.slow
def test_what_was_logged_once_is_a_row_and_no_curve(tmp_path):
    logs = [{**LOGS[0], "mine/words": 3.5, "eval_loss": 0.25, "objective/kl_coef": 0.125}, *LOGS[1:]]
    monitor = {"KLBudgetCallback": {"limit": 9.0}}
    many, one = (write_run(tmp_path / str(len(each)), each) for each in (logs, logs[:1]))
    with open(one / "metrics.rank0.jsonl", "a") as file:
        file.write(json.dumps({"type": "train", "step": 1, "logs": {}, "monitors": monitor}) + "\n")
    texts = [write_report(each, tmp_path / "page.html").read_text() for each in (many, one, [many, one])]
    drawn = [re.findall(r'<svg role="img" aria-label="([^"]*)"', text) for text in texts]
    assert "mine" not in drawn[0] and "loss" in drawn[0]  # the held-out loss is a point beside the curve of the other
    assert not drawn[1] and "score" in drawn[2]  # not even the bound of a curve that is not there
    assert "mine/words13.5" in Page(texts[0]).text.replace("\n", "")
    assert "objective/kl_coef0.1250.125" in Page(texts[2]).text.replace("\n", "")
