"""Which rows these are: content and order count, and how they came here does not."""

import pytest
from datasets import ClassLabel, Dataset, Value, concatenate_datasets, load_dataset

from trl_ext.runs.rows import rows_identity

ROWS = [
    {"prompt": f"prompt {i} é", "ids": list(range(i % 5)), "score": None if i % 7 == 0 else i / 4, "flag": i % 2 == 0}
    | {"messages": [{"role": "user", "content": str(i)}] * (i % 3)}
    for i in range(50)
]


def test_how_rows_came_here_does_not_count(tmp_path):
    whole = Dataset.from_list(ROWS)
    whole.to_json(tmp_path / "rows.jsonl")
    whole.save_to_disk(tmp_path / "disk")
    twice = Dataset.from_list(ROWS + ROWS)
    backwards = whole.select(range(49, -1, -1))
    same = [
        Dataset.from_list(ROWS),
        Dataset.load_from_disk(tmp_path / "disk"),
        twice.select(range(50, 100)),
        backwards.select(range(49, -1, -1)),
        concatenate_datasets([whole.select(range(13)), whole.select(range(13, 50))]),
        whole.map(lambda row: {"prompt": row["prompt"]}, batch_size=3, load_from_cache_file=False),
        whole.select_columns(["score", "messages", "flag", "ids", "prompt"]),
        whole.filter(lambda row: True, load_from_cache_file=False),
        load_dataset(
            "json",
            data_files=str(tmp_path / "rows.jsonl"),
            split="train",
            features=whole.features,
            cache_dir=str(tmp_path / "cache"),
        ),
    ]
    assert [rows_identity(dataset) for dataset in same] == [rows_identity(whole)] * len(same)


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: rows[1:],
        lambda rows: [rows[1], rows[0], *rows[2:]],
        lambda rows: [{**rows[0], "prompt": "prompt 0 e"}, *rows[1:]],
        lambda rows: [*rows[:-2], {**rows[-2], "score": None}, rows[-1]],
        lambda rows: [{**rows[0], "score": 0.0}, *rows[1:]],
        lambda rows: [{**row, "flag": not row["flag"]} for row in rows],
        lambda rows: [{**row, "ids": row["ids"][::-1]} for row in rows],
        lambda rows: [{"text" if key == "prompt" else key: value for key, value in row.items()} for row in rows],
        lambda rows: [{"prompts" if key == "prompt" else key: value for key, value in row.items()} for row in rows],
        lambda rows: [{**row, "more": 1} for row in rows],
    ],
)
def test_any_other_row_counts(change):
    assert rows_identity(Dataset.from_list(change(ROWS))) != rows_identity(Dataset.from_list(ROWS))


def test_where_one_text_ends_counts():
    a, b = (Dataset.from_dict({"a": texts}) for texts in (["ab", "c"], ["a", "bc"]))
    assert rows_identity(a) != rows_identity(b) and rows_identity(a.select([])) == rows_identity(b.select([]))


def test_what_a_number_stands_for_counts():
    numbers = Dataset.from_dict({"a": [0, 1, 1]})
    kinds = [Value("int64"), Value("uint64"), ClassLabel(names=["no", "yes"]), ClassLabel(names=["yes", "no"])]
    assert len({rows_identity(numbers.cast_column("a", kind)) for kind in kinds}) == 4


def test_rows_count_however_many_there_are():
    rows = list(range(20_001))
    swapped = [*rows[:10_000], *rows[20_000:], *rows[10_000:20_000]]
    changed = [rows, rows[:-1], [*rows[:-1], 0], [*rows[:12_000], 0, *rows[12_001:]], swapped]
    assert len({rows_identity(Dataset.from_dict({"a": a})) for a in changed}) == len(changed)
