"""One check of a configuration's values, on a dataclass of its own."""

from dataclasses import dataclass
from typing import Literal

import pytest
from transformers import HfArgumentParser

from trl_ext.settings import check_settings


@dataclass
class Config:
    rate: float = 0.1
    bound: float | None = None
    mode: Literal["plain", "fancy"] = "plain"
    side: Literal["left"] | None = None
    fancy_share: float = 0.5


def check(**given):
    ranges = {"rate": ("> 0", lambda x: x > 0), "bound": (">= 1", lambda x: x >= 1)}
    check_settings(Config(**given), ranges, {"fancy_share": ("mode", "fancy")})


def test_what_can_work_passes():
    HfArgumentParser(Config)  # which takes `| None` away from the fields' types
    check()
    check(bound=2.0, side="left", mode="fancy", fancy_share=0.7)
    check(fancy_share=0.5)  # the default says nothing


def test_what_cannot_is_named(subtests):
    for given, message in [
        ({"rate": 0.0}, "`rate` must be > 0, got 0.0."),
        ({"bound": 0.5}, "`bound` must be >= 1, got 0.5."),
        ({"mode": "odd"}, "`mode` must be one of ['plain', 'fancy'], got 'odd'."),
        ({"mode": None}, "`mode` must be one of ['plain', 'fancy'], got None."),
        ({"side": "right"}, "`side` must be one of ['left'], got 'right'."),
        ({"fancy_share": 0.7}, "`fancy_share=0.7` is for `mode='fancy'`, but `mode='plain'`: set that, or leave"),
    ]:
        with subtests.test(given=given):
            with pytest.raises(ValueError) as error:
                check(**given)
            assert message in str(error.value)
