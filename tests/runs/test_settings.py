"""One check of a configuration's values, on a dataclass of its own."""

import warnings
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Literal

import numpy as np
import pytest
import torch
from transformers import HfArgumentParser

from trl_ext import DPOConfig, PPOConfig
from trl_ext.runs.settings import check_settings, resolve_bf16


@dataclass
class Config:
    rate: float = 0.1
    bound: float | None = None
    mode: Literal["plain", "fancy"] = "plain"
    side: Literal["left"] | None = None
    fancy_share: float = 0.5
    times: int = 2
    limit: int | None = None


def check(**given):
    ranges = {"rate": ("> 0", lambda x: x > 0), "bound": (">= 1", lambda x: x >= 1)}
    check_settings(Config(**given), ranges, {"fancy_share": ("mode", "fancy")})


def test_what_can_work_passes():
    HfArgumentParser(Config)  # which takes `| None` away from the fields' types
    check()
    check(bound=2.0, side="left", mode="fancy", fancy_share=0.7)
    check(fancy_share=0.5)  # the default says nothing
    check(times=np.int64(3), limit=4)


def test_what_cannot_is_named(subtests):
    for given, message in [
        ({"rate": 0.0}, "`rate` must be > 0, got 0.0."),
        ({"rate": None}, "`rate` must be > 0, got None."),
        ({"bound": 0.5}, "`bound` must be >= 1, got 0.5."),
        ({"bound": "2"}, "`bound` must be >= 1, got '2'."),
        ({"times": 1.5}, "`times` must be a whole number, got 1.5."),
        ({"times": None}, "`times` must be a whole number, got None."),
        ({"limit": True}, "`limit` must be a whole number, got True."),
        ({"mode": "odd"}, "`mode` must be one of ['plain', 'fancy'], got 'odd'."),
        ({"mode": None}, "`mode` must be one of ['plain', 'fancy'], got None."),
        ({"side": "right"}, "`side` must be one of ['left'], got 'right'."),
        ({"fancy_share": 0.7}, "`fancy_share=0.7` is for `mode='fancy'`, but `mode='plain'`: set that, or leave"),
    ]:
        with subtests.test(given=given):
            with pytest.raises(ValueError) as error:
                check(**given)
            assert message in str(error.value)


@pytest.mark.parametrize("config", [PPOConfig, DPOConfig])
def test_bf16_is_off_on_a_cpu_unless_it_is_asked_for(config, tmp_path, monkeypatch):
    def made(**kwargs):
        return config(str(tmp_path), report_to="none", **kwargs).bf16

    assert [made(use_cpu=True, bf16=given) for given in (None, False, True)] == [False, False, True]
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert [made(bf16=given) for given in (None, False)] == [False, False]
    with pytest.raises(ValueError, match="`bf16=True`, but there is no GPU: set `bf16=False`"):
        made(bf16=True)
    args = SimpleNamespace(bf16=None, fp16=False, use_cpu=False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    resolve_bf16(args)
    assert args.bf16  # as in TRL


def test_a_config_gives_no_reason_for_a_warning(tmp_path):
    for kind in (PPOConfig, DPOConfig):
        for given, expected in [({}, True), ({"gradient_checkpointing": False}, False)]:
            with warnings.catch_warnings():
                warnings.simplefilter("error", FutureWarning)
                args = kind(str(tmp_path), **given, gradient_checkpointing_kwargs={"use_reentrant": False})
            assert args.activation_checkpointing is args.gradient_checkpointing is expected
            assert args.activation_checkpointing_kwargs == {"use_reentrant": False}
        args = kind(str(tmp_path), activation_checkpointing=False)  # TRL's default is of the old name, and True
        assert args.activation_checkpointing is args.gradient_checkpointing is False


def test_fp16_is_refused_on_a_cpu(monkeypatch):
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    resolve_bf16(args := SimpleNamespace(bf16=None, fp16=True, use_cpu=False))
    assert args.bf16 is False
    for use_cpu, is_there in ((True, True), (False, False)):
        monkeypatch.setattr("torch.accelerator.is_available", lambda is_there=is_there: is_there)
        with pytest.raises(ValueError, match="`fp16=True` does nothing on a CPU"):
            resolve_bf16(SimpleNamespace(bf16=None, fp16=True, use_cpu=use_cpu))
