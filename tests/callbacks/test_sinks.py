"""Sinks receive the alerts, and a sink that fails does not stop training."""

import json
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import wandb
from tenacity import stop_after_attempt

from tests.callbacks.replay import Replay
from tests.tiny import tiny_config
from trl_ext.callbacks import KLBudgetCallback
from trl_ext.runs.files import read_jsonl


def over_budget(args, **kwargs):
    run = Replay(args, KLBudgetCallback(**kwargs))
    run.log(1, logs={"objective/kl": 11.0})
    run.fire("on_train_end")
    return run


@pytest.fixture
def server():
    """Answer each POST by the next status of `answers`, then by 200."""
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


def test_a_broken_sink_does_not_stop_jsonl_and_log(tmp_path, caplog):
    class Broken:
        def send(self, alert):
            raise RuntimeError("no")

    run = over_budget(tiny_config(tmp_path), sinks=[Broken(), "log", "jsonl"])
    (written,) = [row for row in read_jsonl(tmp_path / "alerts.jsonl") if "over" in row["what"]]
    assert written["value"] == 11.0 and written["bound"] == 10.0 and written["timestamp"] <= time.time()
    assert "KLBudgetCallback, step 1: the KL is over its budget (value 11, bound 10). Read comp" in caplog.text
    assert len(run.alerts) == 2 and caplog.text.count("could not send an alert: no") == 2  # also the first rollout's


def test_a_webhook_that_hangs_does_not_delay_training(tmp_path, monkeypatch):
    monkeypatch.setattr("trl_ext.callbacks.monitor.stop_after_attempt", lambda tries: stop_after_attempt(1))
    listener = socket.create_server(("127.0.0.1", 0))  # accepts a connection and never answers
    start = time.monotonic()
    run = over_budget(tiny_config(tmp_path), sinks=[f"http://127.0.0.1:{listener.getsockname()[1]}"])
    assert time.monotonic() - start < 1 and run.alerts
    listener.close()


def test_tensorboard_and_trackio_get_alerts(tmp_path, monkeypatch):
    for package in ("tensorboard", "trackio"):
        pytest.importorskip(package)
    import trackio
    from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

    said = []
    monkeypatch.setattr(trackio, "alert", lambda *alert: said.append(alert[0]))
    over_budget(tiny_config(tmp_path), sinks=["tensorboard", "trackio"], tolerance=99)
    assert said == ["KLBudgetCallback: the KL is over its budget"]
    runs = EventMultiplexer().AddRunsFromDirectory(str(tmp_path / "runs")).Reload()
    (event,) = runs.Tensors("monitors", "alerts/KLBudgetCallback/text_summary")
    assert "the KL is over its budget (value 11, bound 10)" in event.tensor_proto.string_val[0].decode()


def test_tensorboardx_gets_alerts(tmp_path, monkeypatch):
    writer = MagicMock()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monkeypatch.setitem(sys.modules, "tensorboardX", SimpleNamespace(SummaryWriter=writer))
    over_budget(tiny_config(tmp_path), sinks=["tensorboard"], tolerance=99)
    writer.assert_called_once_with(f"{tmp_path}/runs/monitors")
    ((tag, text, step), _) = writer.return_value.__enter__.return_value.add_text.call_args
    assert (tag, step) == ("alerts/KLBudgetCallback", 1) and "the KL is over its budget" in text


def test_wandb_gets_alerts_or_a_warning_says_that_no_run_is_open(tmp_path, monkeypatch, caplog):
    over_budget(tiny_config(tmp_path), sinks=["wandb", "trackio"], tolerance=99)
    assert caplog.text.count("could not send an alert: ") == 2
    seen = []
    monkeypatch.setattr(wandb, "alert", lambda **kwargs: seen.append(kwargs), raising=False)
    over_budget(tiny_config(tmp_path, report_to=["wandb"]), action="raise_kl")
    title = "KLBudgetCallback: the KL is over its budget"
    assert [alert["level"] for alert in seen] == ["WARN", "ERROR"] and seen[1]["title"] == title
