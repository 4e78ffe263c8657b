import numpy as np
import pytest
from datasets import Dataset, DatasetDict

from trl_ext import load_dataset_split
from trl_ext.data import held_out_rows, split_groups

ROWS = {"prompt": ["Once", "There"], "animal": ["cat", "dog"]}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_file_keeps_all_columns(subtests, folder):
    for suffix in ["jsonl", "parquet", "csv"]:
        with subtests.test(suffix=suffix):
            dataset = Dataset.from_dict(ROWS)
            path = folder / f"rows.{suffix}"
            {"parquet": dataset.to_parquet, "csv": dataset.to_csv}.get(suffix, dataset.to_json)(path)
            assert load_dataset_split(path).to_dict() == ROWS
            assert load_dataset_split(f"rows.{suffix}", "train").to_dict() == ROWS


def test_saved_dataset_and_saved_splits(folder):
    dataset = Dataset.from_dict(ROWS)
    dataset.save_to_disk("one")
    DatasetDict(train=dataset, validation=dataset.select([1])).save_to_disk("many")
    assert load_dataset_split("one").to_dict() == ROWS
    assert load_dataset_split("many", "validation")["prompt"][:] == ["There"]
    with pytest.raises(ValueError, match="no split 'test', only train, validation"):
        load_dataset_split("many", "test")


def test_held_out_rows_are_a_split_or_cut_from_training(subtests):
    train, held_out = Dataset.from_dict(ROWS), Dataset.from_dict({"prompt": list("abcdefg")})
    for eval_size, sizes in [(None, (2, 7)), (0, (2, None)), (1, (1, 1))]:
        with subtests.test(eval_size=eval_size):
            parts = held_out_rows(train, lambda: held_out, eval_size, seed=0)
            assert tuple(None if part is None else len(part) for part in parts) == sizes
            if eval_size:
                assert {*parts[0]["prompt"], *parts[1]["prompt"]} == set(ROWS["prompt"])


@pytest.mark.parametrize("text", ["", '{"prompt": "a"'])
def test_an_empty_or_broken_file_is_refused(tmp_path, text):
    (tmp_path / "rows.jsonl").write_text(text)
    with pytest.raises(ValueError, match="rows.jsonl cannot be read"):
        load_dataset_split(tmp_path / "rows.jsonl")


def test_at_least_one_row_is_left_for_training():
    rows = Dataset.from_dict(ROWS)
    with pytest.raises(ValueError, match="none is left"):
        held_out_rows(rows, lambda: rows, len(rows), seed=0)


def test_splits_keep_groups_whole_and_have_their_shares():
    rng = np.random.default_rng(0)
    groups = rng.integers(0, 2000, 4000)
    topic = rng.choice(list("aaabbc"), 2000)[groups]
    shares = {"test": 0.1, "train": 0.7, "val": 0.2}
    split = split_groups(groups, shares, topic, seed=1)
    assert all(len({*split[groups == group]}) == 1 for group in np.unique(groups)[:500])
    for value in "abc":
        for name, share in shares.items():
            rows = topic == value
            assert (split[rows] == name).sum() == pytest.approx(share * rows.sum(), abs=8)  # groups of 2 on average
    assert (split_groups(groups, shares, topic, seed=1) == split).all()
    assert (split_groups(groups, shares, topic, seed=2) != split).mean() > 0.2
    rare = split_groups(range(4000), {"train": 0.9, "test": 0.1}, [i % 1000 for i in range(4000)])
    assert (rare == "test").sum() == pytest.approx(400, abs=3)
