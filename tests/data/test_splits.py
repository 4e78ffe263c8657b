"""Splits that keep groups whole and have equal shares, and balance."""

import numpy as np
import pytest

from trl_ext.data import split_groups


def test_splits_keep_groups_whole_and_shares_alike():
    draw = np.random.default_rng(0)
    groups = draw.integers(0, 2000, 4000)
    topic = draw.choice(list("aaabbc"), 2000)[groups]
    shares = {"test": 0.1, "train": 0.7, "val": 0.2}
    split = split_groups(groups, shares, topic, seed=1)
    assert all(len({*split[groups == group]}) == 1 for group in np.unique(groups)[:500])
    for value in "abc":
        for name, share in shares.items():
            rows = topic == value
            assert (split[rows] == name).sum() == pytest.approx(share * rows.sum(), abs=8)  # groups of 2 in the mean
    assert (split_groups(groups, shares, topic, seed=1) == split).all()
    assert (split_groups(groups, shares, topic, seed=2) != split).mean() > 0.2
    rare = split_groups(range(4000), {"train": 0.9, "test": 0.1}, [i % 1000 for i in range(4000)])
    assert (rare == "test").sum() == pytest.approx(400, abs=3)
