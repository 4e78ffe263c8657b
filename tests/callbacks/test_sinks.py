"""Sinks get the alerts, and no failure of a sink stops training."""

import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import wandb

from tests.callbacks.replay import Replay
from tests.tiny import tiny_config
from trl_ext.callbacks import Alert, KLBudgetCallback, WandbSink, WebhookSink

ALERT = Alert("KLBudgetCallback", "the KL is over its budget", 3, 11.0, 10.0, None, "Stop.", "stop", "docs#kl")


def over_budget(args, **kwargs):
    run = Replay(args, KLBudgetCallback(**kwargs))
    run.log(1, logs={"objective/kl": 11.0})
    run.fire("on_train_end")
    return run


@pytest.fixture
def server():
    """Answers each POST by the next status of `answers`, 200 when there is none."""
    received, answers = [], []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):  # noqa: N802
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(answers.pop(0) if answers else 200)
            self.end_headers()

        def log_message(self, *args):
            pass

    httpd = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{httpd.server_port}", received, answers
    httpd.shutdown()


def test_jsonl_and_log(tmp_path, caplog):
    import logging

    logging.getLogger("transformers").addHandler(caplog.handler)
    run = over_budget(tiny_config(tmp_path))
    (written,) = [
        row for row in map(json.loads, (tmp_path / "alerts.jsonl").read_text().splitlines()) if "over" in row["what"]
    ]
    assert written["value"] == 11.0 and written["bound"] == 10.0 and written["timestamp"] <= time.time()
    assert "KLBudgetCallback, step 1: the KL is over its budget (value 11, bound 10). Read comp" in caplog.text
    assert len(run.alerts) == 2  # the first rollout's, too


def test_webhook_retries(server, monkeypatch):
    monkeypatch.setattr("trl_ext.callbacks.alerts.time.sleep", lambda seconds, sleep=time.sleep: sleep(0.01))
    url, received, answers = server
    answers += [500, 503]
    sink = WebhookSink(url, timeout=5)
    sink.send(ALERT)
    sink.close()
    assert [row["what"] for row in received] == [ALERT.what] * 3 and "value 11, bound 10" in received[0]["text"]


@pytest.mark.parametrize("kind", ["hangs", "refuses"])
def test_webhook_that_hangs_or_refuses_delays_nothing(kind, tmp_path):
    listener = socket.create_server(("127.0.0.1", 0))  # accepts a connection, and never answers
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    if kind == "refuses":
        listener.close()
    start = time.monotonic()
    run = Replay(tiny_config(tmp_path), KLBudgetCallback(sinks=[WebhookSink(url, timeout=0.5, retries=0)]))
    run.log(1, logs={"objective/kl": 11.0})
    assert time.monotonic() - start < 0.4 and run.alerts
    run.fire("on_train_end")
    assert time.monotonic() - start < 3


def test_webhook_drops_what_does_not_fit(caplog):
    import logging

    logging.getLogger("transformers").addHandler(caplog.handler)
    listener = socket.create_server(("127.0.0.1", 0))
    sink = WebhookSink(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=0.2, retries=0, pending=1)
    for _ in range(4):
        sink.send(ALERT)
    assert "is too slow: an alert was dropped" in caplog.text


def test_wandb(monkeypatch):
    seen = []
    monkeypatch.setattr(wandb, "run", None)
    monkeypatch.setattr(wandb, "alert", lambda **kwargs: seen.append(kwargs), raising=False)
    WandbSink().send(ALERT)
    assert seen == []
    monkeypatch.setattr(wandb, "run", object())
    WandbSink().send(ALERT)
    assert seen[0]["title"] == "KLBudgetCallback: the KL is over its budget" and seen[0]["level"] == "ERROR"


def test_a_run_that_reports_to_wandb_alerts_there(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(wandb, "run", object())
    monkeypatch.setattr(wandb, "alert", lambda **kwargs: seen.append(kwargs), raising=False)
    over_budget(tiny_config(tmp_path, report_to=["wandb"]))
    assert len(seen) == 2


def test_a_sink_that_raises_ends_nothing(tmp_path):
    class Broken:
        def send(self, alert):
            raise RuntimeError("no")

    assert over_budget(tiny_config(tmp_path), sinks=[Broken(), "jsonl"]).alerts
    assert (tmp_path / "alerts.jsonl").exists()


def test_a_folder_that_cannot_be_written_is_said_once(tmp_path, caplog):
    import logging

    logging.getLogger("transformers").addHandler(caplog.handler)
    (tmp_path / "file").write_text("")
    args = tiny_config(tmp_path)
    args.output_dir = str(tmp_path / "file")  # a file, so that no folder can be made
    assert over_budget(args).alerts
    assert caplog.text.count("cannot be written") == 1


def test_webhook_arguments_are_checked(subtests):
    for kwargs in [{"url": "ftp://x"}, {"url": "http://x", "timeout": 0}]:
        with subtests.test(kwargs=kwargs), pytest.raises(ValueError, match="got"):
            WebhookSink(**kwargs)
