import json

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
    for suffix in ["jsonl", "json", "parquet", "csv"]:
        with subtests.test(suffix=suffix):
            dataset = Dataset.from_dict(ROWS)
            path = folder / f"rows.{suffix}"
            {"parquet": dataset.to_parquet, "csv": dataset.to_csv}.get(suffix, dataset.to_json)(path)
            assert load_dataset_split(path).to_dict() == ROWS
            assert load_dataset_split(f"rows.{suffix}", "train").to_dict() == ROWS


def test_folder_takes_its_splits_from_the_file_names(folder):
    for split, prompt in (("train", "Once"), ("test", "There")):
        (folder / f"{split}.jsonl").write_text(json.dumps({"prompt": prompt}) + "\n")
    assert load_dataset_split(folder, "train")["prompt"][:] == ["Once"]
    assert load_dataset_split(".", "test")["prompt"][:] == ["There"]


def test_saved_dataset_and_saved_splits(folder):
    dataset = Dataset.from_dict(ROWS)
    dataset.save_to_disk("one")
    DatasetDict(train=dataset, validation=dataset.select([1])).save_to_disk("many")
    assert load_dataset_split("one").to_dict() == ROWS
    assert load_dataset_split("many", "validation")["prompt"][:] == ["There"]


def test_a_part_of_a_split_is_its_rows(folder):
    Dataset.from_dict({"prompt": list("abcdefgh")}).to_json("rows.jsonl")
    for part, expected in (("train[:25%]", "ab"), ("train[25%:]", "cdefgh"), ("train[6:]", "gh"), ("train[2:3]", "c")):
        assert "".join(load_dataset_split("rows.jsonl", part)["prompt"]) == expected
    for wrong in ("train[x:2]", "train[:2", "train[:9999]x"):
        with pytest.raises(ValueError, match="is not a part of a split: write it as 'train"):
            load_dataset_split("rows.jsonl", wrong)
    with pytest.raises(ValueError, match="has no split 'test'; it has 'train'"):
        load_dataset_split("rows.jsonl", "test[:2]")


def test_missing_split_lists_those_there(folder):
    DatasetDict(train=Dataset.from_dict(ROWS), validation=Dataset.from_dict(ROWS)).save_to_disk("many")
    with pytest.raises(ValueError, match=r"'many' has no split 'test'; it has 'train', 'validation'"):
        load_dataset_split("many", "test")


def test_missing_column_names_found_and_needed(folder):
    Dataset.from_dict(ROWS).to_json("rows.jsonl")
    with pytest.raises(ValueError, match=r"lacks the column\(s\) 'chosen', 'rejected'; it has 'prompt', 'animal'"):
        load_dataset_split("rows.jsonl", columns=("prompt", "chosen", "rejected"))


def test_missing_path_is_named(subtests, folder):
    for name in ["absent.jsonl", "./absent", "~/absent-folder", "/absent", "a/b/c"]:
        with (
            subtests.test(name=name),
            pytest.raises(
                FileNotFoundError, match=rf"dataset '{name}': no such file or folder; the working directory is"
            ),
        ):
            load_dataset_split(name)


def test_missing_hub_dataset_says_where_it_looked(subtests, folder):
    for name in ["absent", "owner/absent"]:
        message = f"dataset '{name}': no such file or folder in .* on the hub"
        with subtests.test(name=name), pytest.raises(FileNotFoundError, match=message):
            load_dataset_split(name)


def test_unknown_file_type_lists_the_known_ones(folder):
    (folder / "rows.txt").write_text("Once")
    with pytest.raises(ValueError, match=r"ends in '\.txt'; it must end in \.jsonl, \.json, \.parquet, \.csv"):
        load_dataset_split("rows.txt")


def test_held_out_rows_are_the_split_or_cut_from_training(subtests):
    train, held_out = Dataset.from_dict(ROWS), Dataset.from_dict({"prompt": list("abcdefg")})
    for eval_size, sizes in [(None, (2, 7)), (0, (2, None)), (1, (1, 1))]:
        with subtests.test(eval_size=eval_size):
            parts = held_out_rows(train, lambda: held_out, eval_size, seed=0)
            assert tuple(None if part is None else len(part) for part in parts) == sizes
            if eval_size:
                assert {*parts[0]["prompt"], *parts[1]["prompt"]} == set(ROWS["prompt"])


def test_where_there_is_no_held_out_split_it_says_what_to_do(folder):
    Dataset.from_dict(ROWS).to_json("rows.jsonl")
    train = load_dataset_split("rows.jsonl")
    with pytest.raises(ValueError, match=r"has no split 'test'; it has 'train'; or set `eval_size` to hold out rows"):
        held_out_rows(train, lambda: load_dataset_split("rows.jsonl", "test"), None, seed=0)


def test_a_configuration_of_local_data_is_refused(subtests, folder):
    Dataset.from_dict(ROWS).to_json("rows.jsonl")
    Dataset.from_dict(ROWS).save_to_disk("saved")
    for name in ("rows.jsonl", "saved"):
        with subtests.test(name=name), pytest.raises(ValueError, match="has no configurations: leave out 'main'"):
            load_dataset_split(name, config="main")


def test_a_file_that_cannot_be_read_is_named_with_its_line(subtests, folder):
    for content, message in [
        ('{"prompt": "a"}\n\n{"prompt": \n', 'line 3 of rows.jsonl is not valid JSON, b\'{"prompt": '),
        ("", "it has no rows"),
        ('{"prompt": "a"}\n{"prompt": "\xe9"}\n', r"line 2 of rows.jsonl is not UTF-8, b'.*': convert the file"),
    ]:
        with subtests.test(content=content):
            (folder / "rows.jsonl").write_text(content, encoding="latin-1")
            with pytest.raises(ValueError, match=f"^dataset 'rows.jsonl' cannot be read: {message}"):
                load_dataset_split("rows.jsonl")


def test_a_csv_file_that_is_not_utf_8_is_refused(folder):
    (folder / "rows.csv").write_text("prompt,animal\ncaf\xe9,cat\n", encoding="latin-1")
    with pytest.raises(ValueError, match="^dataset 'rows.csv' cannot be read: .*utf-8"):
        load_dataset_split("rows.csv")
