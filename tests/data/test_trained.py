"""Which pairs a model was trained on: which pairs are equal, what is stored of them, and which are held out."""

import random

import numpy as np
import pytest
from datasets import Dataset

from trl_ext.data import TrainedPairs, pair_hashes
from trl_ext.data.trained import TRAINED_PAIRS


def pairs(start, stop):
    return [{"prompt": f"Ask {i} ? ", "chosen": f"yes {i}", "rejected": f"no {i}"} for i in range(start, stop)]


def as_messages(row):
    asked = [{"role": "user", "content": row["prompt"]}]
    return {"prompt": asked} | {name: [{"role": "assistant", "content": row[name]}] for name in ("chosen", "rejected")}


def without_prompt(row):
    return {name: row["prompt"] + row[name] for name in ("chosen", "rejected")}


def turned(row):
    return {"prompt": row["prompt"], "chosen": row["rejected"], "rejected": row["chosen"]}


def typed(row):
    return {name: f" {text.upper().replace(' ', '  ')}" for name, text in row.items()}


@pytest.mark.parametrize("other", [without_prompt, turned, typed, as_messages])
def test_a_pair_is_recognised_in_any_form_and_order(other):
    trained = TrainedPairs.of(Dataset.from_list(pairs(0, 20)))
    again = pairs(10, 30)
    random.Random(0).shuffle(again)
    expected = [int(row["prompt"].split()[1]) < 20 for row in again]
    hashes = pair_hashes(Dataset.from_list([other(row) for row in again]))
    assert trained.has(hashes).tolist() == expected and hashes.shape == (20, 2)


def test_the_file_is_read_again_and_not_uploaded(tmp_path):
    one, two = (TrainedPairs.of(Dataset.from_list(pairs(*ends))) for ends in ((0, 3), (2, 6)))
    assert TrainedPairs.load(tmp_path) is None
    one.save(tmp_path)
    two.save(tmp_path, is_uploaded=True)
    assert [path.parent.name for path in tmp_path.rglob(TRAINED_PAIRS)] == ["_run"]  # the earlier file is gone
    found = TrainedPairs.load(tmp_path)
    np.testing.assert_array_equal(found.pairs, two.pairs)
    both = one | TrainedPairs(found.pairs, is_complete=False)
    assert len(both) == 6 and not both.is_complete and (one | found).is_complete


def test_no_code_of_a_folder_is_executed(tmp_path):
    np.savez(tmp_path / TRAINED_PAIRS, pairs=np.array([print], object), is_complete=True)
    with pytest.raises(ValueError, match="allow_pickle=False"):
        TrainedPairs.load(tmp_path)
