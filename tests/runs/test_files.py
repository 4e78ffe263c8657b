"""A file is either unchanged or completely written."""

import pytest

from trl_ext.data import write_rows
from trl_ext.runs import read_jsonl, whole_file, write_text
from trl_ext.runs.files import append_jsonl


@pytest.mark.parametrize("failure", [OSError, KeyboardInterrupt])
def test_a_failed_write_leaves_the_old_file_and_no_other(failure, tmp_path):
    path = tmp_path / "rows.jsonl"
    write_text(path, "before")

    def rows():
        yield {"row": 1}
        raise failure

    with pytest.raises(failure):
        write_rows(path, rows())
    assert path.read_text() == "before" and [*tmp_path.iterdir()] == [path]
    with pytest.raises(failure), whole_file(path, durably=True) as temporary:
        temporary.write_text("half")
        raise failure
    assert path.read_text() == "before" and [*tmp_path.iterdir()] == [path]
    write_rows(path, [{"row": 1}])
    assert path.read_text() == '{"row": 1}\n'


def test_lines_are_appended_after_a_torn_one_and_lost_where_no_file_can_be(tmp_path):
    path = tmp_path / "new" / "rows.jsonl"
    append_jsonl(path)
    assert not path.exists()
    append_jsonl(path, {"row": 1})
    path.write_text(path.read_text() + '{"row')  # killed within a line
    append_jsonl(path, {"row": float("nan")}, {"row": "\ud800"})
    assert [*read_jsonl(path)] == [{"row": 1}, {"row": "nan"}, {"row": "\ud800"}]
    append_jsonl(path / "below a file", {"row": 1})
