"""The page of one run and of several: its content, and that it loads nothing from elsewhere."""

import html
import html.parser
import json
import os
import re
import xml.etree.ElementTree

import pytest
from jinja2 import UndefinedError
from markupsafe import Markup

from trl_ext.callbacks.metrics import curve
from trl_ext.workbench.pages.markup import render, with_error
from trl_ext.workbench.pages.page import next_step, verdict
from trl_ext.workbench.pages.report import main, page, read_run, report_of, write_report

LOGS = [
    {"step": step, "loss": 1 / step, "objective/kl": 0.5 * step, "objective/scores": step, "objective/scores_std": 1.0}
    for step in range(1, 10)
]
BRIEF = [{"step": 1, "loss": 1.0}]  # it has one chart
ALERT = {
    "monitor": "KLBudgetCallback",
    "what": "the KL is over its <budget>",
    "step": 7,
    "value": 3.5,
    "bound": 3.0,
    "baseline": None,
    "advice": "Stop.",
    "action": "stop",
    "level": "alert",
    "runbook": "docs/runbook.md#kl",
}


def write_lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_run(folder, logs, config_class="PPOConfig", config=(), alerts=(), samples=(), monitors=None):
    """Write the files of JSONLCallback, monitors and SamplesCallback for a run that ended."""
    begin = {"type": "begin", "step": 0, "run": folder.name, "config": dict(config), "config_class": config_class}
    rows = [{"type": "train", "step": log["step"], "logs": log} for log in logs]
    end = {"type": "end", "step": len(logs), "logs": {}} | ({} if monitors is None else {"monitors": monitors})
    write_lines(folder / "metrics.rank0.jsonl", [begin, *rows, end])
    write_lines(folder / "alerts.jsonl", alerts)
    write_lines(folder / "completions.rank0.jsonl", samples)
    return folder


def answer(prompt, completion, step, score=0.5):
    return {"prompt": prompt, "completion": completion, "step": step, "scores": {"good": score}}


def alert(monitor, action, step):
    return {**ALERT, "monitor": monitor, "action": action, "step": step}


class Page(html.parser.HTMLParser):
    """A page's open tags, references and text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.ends, self.references, self.ids, self.attributes, self.text = [], [], [], [], set(), ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attributes}
        self.references += [v for k, v in attributes if k in ("src", "href", "xlink:href") and v]
        self.ids += [v for k, v in attributes if k == "id"]

    def handle_endtag(self, tag):
        self.ends.append(tag)

    def handle_data(self, data):
        self.text += data

    @property
    def stands_alone(self):
        """Whether each reference is to an id in the page, and no id occurs twice."""
        return {f"#{name}" for name in self.ids} >= {*self.references} and len(self.ids) == len({*self.ids})


def said(text):
    return html.unescape(re.search(r'<h1>[^<]*</h1><p class="verdict">([^<]*)</p>', text)[1])


def charts(text):
    return re.findall(r'<svg role="img" aria-label="([^"]*)"', text)


def tiles(text):
    return dict(re.findall(r'class="tile">([^<]*)<b>([^<]*)', text))


def test_the_page_of_one_run(tmp_path):
    samples = [answer("ask", f"<i>answer</i> {step}", step, step / 9) for step in range(1, 10)]
    config = {"learning_rate": 0.125, "note": "<b>"}
    folder = write_run(tmp_path / "run", LOGS, config=config, alerts=[ALERT], samples=samples)
    with (folder / "metrics.rank0.jsonl").open("a") as file:
        file.write('{"type": "train", "step": 10, "lo')  # killed here
    run = read_run(folder)
    text = page(run)
    parsed = Page(text)
    assert "What the reward paid for" not in text  # without monitors
    assert said(text) == verdict(run) and next_step(run).replace("`", "") in parsed.text
    assert parsed.stands_alone and "@import" not in text and not re.search(r"url\((?!#)", text)
    for part in ("the KL is over its <budget>", "<i>answer</i> 9", "learning_rate", "<b>", "0.5 → 4.5"):
        assert part in parsed.text
    assert "script" not in parsed.tags and "prefers-color-scheme: dark" in text and "currentColor" in text
    assert parsed.tags.count("i") == 0  # completions are escaped
    assert charts(text) == ["scores", "KL to the reference, nats", "loss", "good: density of single scores"]
    places = [text.index(f">{phase} third<") for phase in ("first", "second", "last")]
    assert places == sorted(places)  # in the legend
    assert '<td class="" data-name="what">the KL is over its &lt;budget&gt;</td>' in text  # also on a narrow page
    # An alert links to its advice in the page
    assert "#runbook-kl" in parsed.references and "Are completions better than in the first rollouts" in parsed.text


def test_the_page_of_a_run_without_our_callbacks(tmp_path):
    (tmp_path / "checkpoint-9").mkdir()
    logs = [{"step": step, "objective/kl": step} for step in (1, 2)]
    (tmp_path / "checkpoint-9" / "trainer_state.json").write_text(json.dumps({"log_history": logs}))
    main([str(tmp_path)])
    parsed = Page((tmp_path / "report.html").read_text())
    for part in ("No completions", "No monitors were set.", "KL to the reference"):
        assert part in parsed.text


def test_the_last_run_is_shown_and_repeated_steps_count_once(tmp_path):
    """The first run ended at step 9. The second was killed at step 6, resumed from step 4, and is at step 7."""

    def events(run, start, steps, begun, kl):
        config = {"model_init_kwargs": {"token": "secret"}, "run_name": run}
        begin = {"type": "begin", "step": start, "run": run, "config": config, "config_class": "PPOConfig"}
        yield {"timestamp": begun, **begin}
        for step in steps:
            yield {"timestamp": begun + step, "type": "train", "step": step, "logs": {"objective/kl": kl}}

    begun, resumed = 1000.0, 2000.0
    lines = [*events("first", 0, range(1, 10), 100.0, 1.0), *events("second", 0, range(1, 7), begun, 2.0)]
    lines += events("second", 4, range(5, 8), resumed, 3.0)
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
    write_lines(tmp_path / "alerts.jsonl", [old, kept, undone, {**notice, "level": "notice"}])
    rows = [(f"answer {at:.0f} {step}", step, at + step) for at in (100.0, begun) for step in (0, 6)]
    write_lines(tmp_path / "completions.rank0.jsonl", [{**answer("p", c, s), "timestamp": at} for c, s, at in rows])
    (tmp_path / "checkpoint-9").mkdir()
    (tmp_path / "checkpoint-9" / "trainer_state.json").write_text(json.dumps({"log_history": LOGS}))
    os.utime(tmp_path / "checkpoint-9" / "trainer_state.json", (109, 109))  # the first run's

    run = read_run(tmp_path)
    assert [log["step"] for log in run.history] == [1, 2, 3, 4, 5, 6, 7] and run.last_step == 7
    assert curve(run.history, "objective/kl")[1] == [2.0] * 4 + [3.0] * 3
    assert [alert["what"] for alert in run.alerts] == ["kept", "nothing to watch: no key"]
    assert [row["completion"] for row in run.samples] == ["answer 1000 0"]
    text = page(run)
    assert "PPOConfig, run second" in text and "resumed at step 4" in text and "run first" not in text
    assert "secret" not in text and "&lt;redacted&gt;" in text
    assert (tiles(text)["steps"], tiles(text)["alerts"]) == ("7, not ended", "1")


def test_report_at_the_end_of_a_script(tmp_path, capsys):
    folder = write_run(tmp_path / "run", BRIEF)
    assert report_of(folder, was_trained=False) == "No report: nothing was trained"
    assert report_of(folder) == f"Report: {folder / 'report.html'}"
    before = (folder / "report.html").stat().st_mtime_ns
    assert report_of(folder, was_trained=False) == f"Report: {folder / 'report.html'}"
    assert (folder / "report.html").stat().st_mtime_ns == before
    assert report_of(tmp_path / "none").startswith(f"No report: {tmp_path / 'none'} has no logs of a run")
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path)])
    assert f"runs within it: {folder}\n" in capsys.readouterr().err


HOSTILE = [
    "$",
    "a_$\\frac{",
    "100% %s %(x)d {0} {</text></svg><script>alert(1)</script>",
    "--><img src=x onerror=alert(1)>]]>&amp;&#0;&lt",
    '" onmouseover="x" id=" url(#x) #010203',
    "日本語 العربية 🙂 \N{COMBINING ACUTE ACCENT}\ud83d half",
    "\0\x07\x1b[31m\x7f\x85line\nbreak\r\ttab\u2028\u2029",
    "",
]


@pytest.mark.slow
def test_names_and_texts_are_escaped(tmp_path):
    """Those of rewards, prompts, completions, alerts, settings and folders, on both kinds of page."""
    logs = [{"step": step, "loss": 0.1} | {f"rewards/{text}/mean": step for text in HOSTILE} for step in (1, 2)]
    told = {
        "config": {"run_name": HOSTILE[2]},
        "alerts": [{**ALERT, "monitor": text, "what": text, "advice": text} for text in HOSTILE],
        "samples": [{**answer(text, text, 1), "scores": {text: 1.0, "huge": 1e308}} for text in HOSTILE],
    }
    runs = [write_run(tmp_path / name, logs, **told) for name in ("a <b> $x_ %s '\" & 日本", "<script>alert(1)")]
    for given in (runs[:1], runs):
        text = write_report(given, tmp_path / "page.html").read_text(encoding="utf-8")
        parsed = Page(text)
        assert parsed.stands_alone and not [name for name in parsed.attributes if name.startswith("on")]
        assert not {"script", "img", "b-", "i"} & set(parsed.tags)
        assert parsed.tags.count("svg") == parsed.ends.count("svg") > 1
        assert parsed.ends.count("html") == 1 and parsed.ends[-1] == "html"  # the page is complete
        assert "a_$\\frac{" in text and not re.search("[\0-\b\x0e-\x1f\x7f-\x9f]", text)
        for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
            xml.etree.ElementTree.fromstring(svg)


@pytest.mark.slow
def test_an_episode_is_shown_by_turns(tmp_path):
    """Thoughts, texts, calls and results, in order and escaped."""
    call = {"type": "function", "function": {"name": "look", "arguments": {"by": [1]}}}
    look = {"role": "assistant", "tool_calls": [call], "content": "I <b>look</b>.", "reasoning_content": "Where am I?"}
    wall = {"role": "tool", "name": "look", "content": "a <i>wall</i>\n" * 9}
    episode = [look, wall, {"role": "tool", "name": "go", "content": "{'error': 'no such tool'}"}]
    samples = [answer("p", episode, 5), answer("q", "flat\ntext", 6)]
    text = page(read_run(write_run(tmp_path / "run", LOGS, samples=samples)))
    parsed = Page(text)
    shown = ["Where am I?", "I <b>look</b>.", 'look({"by": [1]})', "look said", "a <i>wall</i>", "go said", "no such"]
    places = [parsed.text.index(part) for part in shown]
    assert places == sorted(places) and not {"i", "script"} & {*parsed.tags} and "flat\ntext" in parsed.text
    assert text.count('class="turn fails"') == 1


@pytest.fixture
def two_runs(tmp_path):
    """PPO with and without a KL penalty, in folders with the same name."""
    config = {"learning_rate": 0.125, "kl_coef": 0.1, "output_dir": "a"}
    samples = [answer("both", "old <b>", 1), answer("both", "good <b>", 9), answer("only here", "x", 9)]
    first = write_run(tmp_path / "a" / "ppo", LOGS, config=config, samples=samples)
    logs = [{**log, "objective/kl": 9.0 * log["step"]} for log in LOGS[:5]]
    config |= {"kl_coef": 0.0, "output_dir": "b"}
    samples = [answer("both", "worse", 5)]
    second = write_run(tmp_path / "b" / "ppo", logs, config=config, alerts=[ALERT] * 2, samples=samples, monitors={})
    return first, second


def test_several_runs_on_one_page(two_runs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main([str(folder) for folder in two_runs])
    assert capsys.readouterr().out == "comparison.html\n"  # in the parent folder of both runs
    text = (tmp_path / "comparison.html").read_text()
    parsed = Page(text)
    rows = [re.findall(r'data-name="([^"]*)">(.*?)</td>', row) for row in re.findall(r"<tr>(.*?)</tr>", text, re.S)]
    summary = {row[0][1]: dict(row[1:]) for row in rows if row and row[0][0] == "first → last"}
    assert summary["KL, nats per completion"] == {"a/ppo": "0.5 → 4.5", "b/ppo": "9 → 45"}
    assert summary["alerts"] == {"a/ppo": "0", "b/ppo": "2"} and summary["steps"] == {"a/ppo": "9", "b/ppo": "5"}
    differing = [dict(row) for row in rows if row and row[0][0] == "setting"]
    assert differing == [{"setting": "kl_coef", "a/ppo": "0.1", "b/ppo": "0.0"}]
    (sample,) = [dict(row) for row in rows if row and row[0][0] == "prompt"]
    assert sample["prompt"] == "both" and sample["a/ppo"].startswith("good &lt;b&gt;") and "worse" in sample["b/ppo"]
    (kl,) = re.findall(r'<figure><svg role="img" aria-label="KL, nats per completion".*?</figure>', text, re.S)
    assert {"#0072b2", "#d55e00"} <= set(re.findall(r"stroke: (#\w{6})", kl)) and kl.count("ppo</text>") == 2
    assert parsed.text.count("the KL is over its <budget>") == 2 and parsed.stands_alone
    assert said(text) == "In b/ppo KLBudgetCallback stopped the run at step 7."


@pytest.mark.slow
def test_an_evaluation_of_the_runs_is_shown(two_runs, tmp_path):
    of = {"rewards": {}, "kl": None, "length": None, "cut_off": 0.25, "distinct_3": None, "repeated": 0.0}
    of |= {"self_bleu": None, "win_rates": {"length": {"win_rate": 0.75, "interval": [0.5, 1.0]}}}
    policies = {"x": {**of, "policy": str(two_runs[1] / "checkpoint-5")}}
    found = {"prompts": 1, "baseline": "base", "notes": ["Not checked: <x>"], "policies": policies}
    write_lines(tmp_path / "evaluation.json", [found])
    main([*map(str, two_runs), "--output", str(tmp_path / "page.html"), "--evaluation", str(tmp_path)])
    text = Page((tmp_path / "page.html").read_text()).text
    assert "wins by length–75.0% (50.0% to 100.0%)" in text and "Not checked: <x>" in text
    write_report(two_runs[1], evaluation=tmp_path)  # one run keeps its page
    text = Page((two_runs[1] / "report.html").read_text()).text
    for part in ("The score rose from 1 to 5", "wins by length75.0%", "Not checked: <x>", "Configuration"):
        assert part in text
    with pytest.raises(ValueError, match=f"no figures of ppo, only of x .{two_runs[1] / 'checkpoint-5'}"):
        write_report(two_runs[0], evaluation=tmp_path)


def test_no_credential_of_a_monitor_is_shown(tmp_path):
    hook, log = ({"KLBudgetCallback": {"sinks": [sink]}} for sink in ("https://hooks.slack.com/services/T0/x", "log"))
    runs = [
        write_run(tmp_path / name, BRIEF, config={"beta": 1}, monitors=monitors)
        for name, monitors in (("a", hook), ("b", log))
    ]
    text = write_report(runs, tmp_path / "page.html").read_text()
    assert "KLBudgetCallback" in text and "&lt;redacted&gt;" in text and "T0/" not in text


@pytest.mark.parametrize(
    ("monitors", "alerts", "watched"),
    [
        ({}, [], "no monitors were set"),
        ({"A": {}}, [{**alert("A", "warn", 3), "level": "notice"}], "A watched and found nothing"),
        (
            {"A": {}, "<B>": {}},
            [alert("A", "warn", 3), alert("<B>", "raise_kl", 5)],
            "<B> raised the KL coefficient at step 5 and A warned at step 3",
        ),
    ],
)
def test_a_page_begins_with_the_runs_end_and_its_monitors(monitors, alerts, watched, tmp_path):
    run = read_run(write_run(tmp_path / "run", LOGS, alerts=alerts, monitors=monitors))
    rose = "The score rose from 1 to 9 and the KL rose from 0.5 to 4.5 nats per completion"
    assert verdict(run) == f"{rose}; {watched}."


def test_a_last_step_that_is_evaluated_twice_is_one_measurement(tmp_path):
    logs = [{"step": 2, "loss": 0.7}] + [{"step": 2, "eval_loss": 0.5}] * 2
    text = page(read_run(write_run(tmp_path / "run", logs, "SFTConfig")))
    assert said(text) == "The held-out loss was 0.5 nats per token."
    (chart,) = re.findall(r'<svg role="img" aria-label="loss".*?</svg>', text, re.S)
    assert chart.count("-xtick_") == 1  # there is no step 1.95
    assert "stroke-dasharray" in chart  # the evaluation's line; the training's is first in the legend
    assert chart.rindex(">loss<") < chart.index(">eval_loss<")


@pytest.mark.slow
def test_the_page_of_a_reward_model_has_its_reports_verdict(tmp_path):
    folder = write_run(tmp_path / "reward", [{"step": 1, "accuracy": 0.9, "eval_accuracy": 0.6}], "RewardConfig")
    for passed, words in ((True, "passed"), (False, "did not pass")):
        verdict = {"passed": passed, "reasons": [] if passed else ["it likes <i>"]}
        report = {"accuracy": 0.6, "verdict": verdict, "trained_on": {"is_known": passed}}
        (folder / "reward_report.json").write_text(json.dumps(report))
        text = page(read_run(folder))
        assert ("held-out accuracy, as saved" in text) is passed  # not on pairs that it may have been trained on
        assert said(text).endswith(f"; the saved model {words} its report.")
        assert ("Not passed: " in text and "<li>it likes &lt;i&gt;</li>" in text) is not passed


@pytest.mark.parametrize(
    ("value", "error", "shown"),
    [
        (0.472312, 0.0123, "0.472 ± 0.012"),
        (1234.5678, 120.3, "1,235 ± 120"),
        (float("nan"), float("nan"), "nan ± nan"),
    ],
)
def test_a_value_has_as_many_digits_as_its_error_allows(value, error, shown):
    assert with_error(value, error) == shown


def test_a_template_escapes_all_but_our_own_html(tmp_path):
    (tmp_path / "any.j2").write_text("{{ text }} {{ drawing }} {{ text | code }} {{ text | prose }}")
    shown = render(tmp_path / "any.j2", text="`a` <i>", drawing=Markup("<svg>"))
    assert shown == "`a` &lt;i&gt; <svg> <code>a</code> &lt;i&gt; <code>a</code> &lt;i&gt;"
    with pytest.raises(UndefinedError, match="missing"):
        (tmp_path / "any.j2").write_text("{{ missing }}")
        render(tmp_path / "any.j2")
