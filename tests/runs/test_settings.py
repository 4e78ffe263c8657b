"""The check of a configuration's values, on a test dataclass."""

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Literal

import numpy as np
import pytest
import torch
from transformers import HfArgumentParser

from trl_ext import DPOConfig, PPOConfig
from trl_ext.dpo import RewardConfig, SFTConfig
from trl_ext.runs.settings import check_settings, resolve_for_device, setting


@dataclass
class Config:
    rate: float = setting(0.1, "Rate. It is per step.", range="> 0")
    bound: float | None = None
    mode: Literal["plain", "fancy"] = "plain"
    side: Literal["left"] | None = None
    fancy_share: float = setting(0.5, "Share.", range="in [0, 1), a share", only_with=("mode", "fancy"))
    pair: list[float] | None = setting(None, "Two.", range=("two numbers", lambda x: len(x) == 2))
    top: float = setting(1.0, "Top.", range="> 0 and finite")
    times: int = 2
    limit: int | None = None


def check(**given):
    check_settings(Config(**given), {"bound": ">= 1"}, {"times": ("mode", "plain")})


def test_valid_settings_pass():
    HfArgumentParser(Config)  # which removes `| None` from the fields' types
    check()
    check(bound=2.0, side="left", mode="fancy", fancy_share=0.0, pair=[1, 2])
    check(fancy_share=0.5)  # the default is not checked
    check(times=np.int64(3), limit=4)


def test_an_invalid_setting_is_named(subtests):
    for given, message in [
        ({"rate": 0.0}, "`rate` must be > 0, got 0.0."),
        ({"bound": 0.5}, "`bound` must be >= 1, got 0.5."),
        ({"times": 1.5}, "`times` must be a whole number, got 1.5."),
        ({"limit": True}, "`limit` must be a whole number, got True."),
        ({"top": math.inf}, "`top` must be > 0 and finite, got inf."),
        ({"top": math.nan}, "`top` must be > 0 and finite, got nan."),
        ({"fancy_share": 1.0, "mode": "fancy"}, "`fancy_share` must be in [0, 1), a share, got 1.0."),
        ({"pair": [1.0]}, "`pair` must be two numbers, got [1.0]."),
        ({"pair": 1.0}, "`pair` must be two numbers, got 1.0."),
        (
            {"times": 3, "mode": "fancy"},
            "`times=3` needs `mode='plain'`, but `mode='fancy'`. Set `mode='plain'`, or leave",
        ),
        ({"mode": "odd"}, "`mode` must be one of ['plain', 'fancy'], got 'odd'."),
        (
            {"fancy_share": 0.7},
            "`fancy_share=0.7` needs `mode='fancy'`, but `mode='plain'`. Set `mode='fancy'`, or leave",
        ),
    ]:
        with subtests.test(given=given):
            with pytest.raises(ValueError) as error:
                check(**given)
            assert message in str(error.value)


@pytest.mark.parametrize("config", [PPOConfig, DPOConfig])
def test_bf16_is_off_on_a_cpu_unless_it_is_set(config, tmp_path, monkeypatch):
    def made(**kwargs):
        args = config(str(tmp_path), report_to="none", **kwargs)
        assert args.dataloader_pin_memory is torch.accelerator.is_available()  # else torch warns
        return args.bf16

    assert [made(use_cpu=True, bf16=given) for given in (None, False, True)] == [False, False, True]
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert [made(bf16=given) for given in (None, False)] == [False, False]


@pytest.mark.parametrize("cls", [SFTConfig, RewardConfig])
def test_activation_checkpointing_is_off_on_a_cpu_unless_it_is_set(cls, tmp_path, monkeypatch):
    def is_on(**given):
        args = cls(str(tmp_path), use_cpu=True, **given)
        assert args.dataloader_pin_memory is torch.accelerator.is_available()
        return args.bf16, args.activation_checkpointing, args.gradient_checkpointing

    assert is_on() == (False, False, False)
    assert (
        is_on(bf16=True, gradient_checkpointing=True) == is_on(bf16=True, activation_checkpointing=True) == (True,) * 3
    )


@pytest.mark.parametrize(("given", "expected"), [({}, (True, True)), ({"fp16": True}, (False, True))])
def test_both_are_on_with_a_gpu(given, expected, monkeypatch):
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    names = ("bf16", "gradient_checkpointing", "activation_checkpointing", "gradient_checkpointing_kwargs")
    unset = dict.fromkeys([*names, "activation_checkpointing_kwargs"])
    args = SimpleNamespace(**{"use_cpu": False, "fp16": False, "dataloader_pin_memory": True} | unset | given)
    resolve_for_device(args, activation_checkpointing=True)
    assert (args.bf16, args.activation_checkpointing) == expected
