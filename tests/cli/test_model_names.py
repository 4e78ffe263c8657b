"""What is said of a model that the hub does not give."""

import re
from types import SimpleNamespace

import pytest
from huggingface_hub.errors import GatedRepoError, OfflineModeIsEnabled, RepositoryNotFoundError, RevisionNotFoundError

from trl_ext.cli.model_names import check_model
from trl_ext.runs.nearest import near_path

RESPONSE = SimpleNamespace(headers={}, request=None, status_code=404)


def test_the_hub_is_asked_once_and_each_refusal_says_what_to_do(subtests, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "model").mkdir(parents=True)
    for raised, message in [
        (
            RepositoryNotFoundError("", response=RESPONSE),
            "no such folder in .*; did you mean owner/model\\?, and",
        ),
        (GatedRepoError("", response=RESPONSE), "is gated: ask for access at https://huggingface.co/owner/modle"),
        (
            RevisionNotFoundError("", response=RESPONSE),
            "has no revision 'v2': give one of its branches, tags or commits",
        ),
        (OfflineModeIsEnabled(""), "not in the hub's cache, and HF_HUB_OFFLINE is set"),
        (TimeoutError(), "not in the hub's cache, and the hub cannot be reached"),
    ]:
        with subtests.test(raised=type(raised).__name__):
            asked = []

            def model_info(self, name, asked=asked, raised=raised, **kwargs):
                asked.append(name)
                raise raised

            monkeypatch.setattr("trl_ext.cli.model_names.HfApi.model_info", model_info)
            with pytest.raises(FileNotFoundError, match="^`ref` owner/modle.*" + message):
                check_model("ref", "owner/modle", "v2")
            assert asked == ["owner/modle"]


def test_an_adapters_base_is_looked_for_too(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "./absent/base"}')
    with pytest.raises(FileNotFoundError, match=re.escape(f"of the adapter `{tmp_path}` ./absent/base: there is no")):
        check_model("adapter", tmp_path)


def test_the_nearest_path_is_the_whole_one_where_it_exists(tmp_path):
    (tmp_path / "outputs" / "sft").mkdir(parents=True)
    assert near_path(tmp_path / "output" / "sft") == f"; did you mean {tmp_path}/outputs/sft?"
    assert near_path(tmp_path / "output" / "x") == f"; did you mean {tmp_path}/outputs?"
    assert near_path(tmp_path / "quite" / "other") == ""
