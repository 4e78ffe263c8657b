import pytest
from datasets import Dataset, DatasetDict

from trl_ext import load_dataset_split
from trl_ext.data import held_out_rows

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


def test_held_out_rows_are_the_split_or_cut_from_training(subtests):
    train, held_out = Dataset.from_dict(ROWS), Dataset.from_dict({"prompt": list("abcdefg")})
    for eval_size, sizes in [(None, (2, 7)), (0, (2, None)), (1, (1, 1))]:
        with subtests.test(eval_size=eval_size):
            parts = held_out_rows(train, lambda: held_out, eval_size, seed=0)
            assert tuple(None if part is None else len(part) for part in parts) == sizes
            if eval_size:
                assert {*parts[0]["prompt"], *parts[1]["prompt"]} == set(ROWS["prompt"])


@pytest.mark.parametrize("text", ["", '{"prompt": "a"'])
def test_a_file_without_rows_or_with_a_broken_one_is_refused(tmp_path, text):
    (tmp_path / "rows.jsonl").write_text(text)
    with pytest.raises(ValueError, match="rows.jsonl cannot be read"):
        load_dataset_split(tmp_path / "rows.jsonl")


def test_some_row_is_left_to_train_on():
    rows = Dataset.from_dict(ROWS)
    with pytest.raises(ValueError, match="none is left"):
        held_out_rows(rows, lambda: rows, len(rows), seed=0)
