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
from trl_ext.callbacks import KLBudgetCallback, WebhookSink
from trl_ext.runs.files import read_jsonl


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


def test_jsonl_and_log_whatever_another_sink_does(tmp_path, caplog):
    class Broken:
        def send(self, alert):
            raise RuntimeError("no")

    run = over_budget(tiny_config(tmp_path), sinks=[Broken(), "log", "jsonl"])
    (written,) = [row for row in read_jsonl(tmp_path / "alerts.jsonl") if "over" in row["what"]]
    assert written["value"] == 11.0 and written["bound"] == 10.0 and written["timestamp"] <= time.time()
    assert "KLBudgetCallback, step 1: the KL is over its budget (value 11, bound 10). Read comp" in caplog.text
    assert len(run.alerts) == 2 and caplog.text.count("could not send an alert: no") == 2  # the first rollout's, too


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


def test_a_run_that_reports_to_wandb_alerts_there_if_its_run_is_open(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(wandb, "alert", lambda **kwargs: seen.append(kwargs), raising=False)
    for run in (None, object()):
        monkeypatch.setattr(wandb, "run", run)
        over_budget(tiny_config(tmp_path, report_to=["wandb"]), action="raise_kl")
        assert (run is None) == (seen == [])
    title = "KLBudgetCallback: the KL is over its budget"
    assert [alert["level"] for alert in seen] == ["WARN", "ERROR"] and seen[1]["title"] == title
