"""Fingerprints of models and tokenizers."""

from types import SimpleNamespace

import pytest
import torch

from tests.tiny import tiny_tokenizer
from trl_ext.models.weights import hash_of, hub_identity, path_identity, tokenizer_identity


def test_a_model_of_the_hub_is_identified_by_name_and_commit(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    cached = tmp_path / "models--org--base"
    for commit in ("1" * 40, "2" * 40):
        (cached / "snapshots" / commit).mkdir(parents=True)
        (cached / "snapshots" / commit / "config.json").write_text("{}")
        (cached / "refs").mkdir(exist_ok=True)
        (cached / "refs" / "main").write_text(commit)
        assert hub_identity("org/base") == f"org/base@{commit}"
    assert hub_identity("org/base", "1" * 40) == f"org/base@{'1' * 40}"
    monkeypatch.setattr("trl_ext.models.weights.model_info", lambda path, **kwargs: SimpleNamespace(sha=path[-1] * 40))
    assert path_identity("org/base") == hub_identity("org/base") and path_identity("org/c") == f"org/c@{'c' * 40}"
    assert hub_identity("org/other") is None and hub_identity(str(tmp_path)) is None and hub_identity(None) is None


@pytest.mark.parametrize("kind", ["bos", "eos", "pad", "unk"])
def test_a_tokenizers_special_tokens_count(kind):
    other = tiny_tokenizer()
    assert tokenizer_identity(other) == tokenizer_identity(tiny_tokenizer())
    setattr(other, f"{kind}_token", "cat")
    assert tokenizer_identity(other) != tokenizer_identity(tiny_tokenizer())


def test_a_chat_template_counts():
    other = tiny_tokenizer()
    other.chat_template += " "
    assert tokenizer_identity(other) != tokenizer_identity(tiny_tokenizer())


def test_weights_are_identified_by_names_shapes_and_values():
    weights = {"a": torch.arange(6.0), "b": torch.zeros(2)}
    others = [
        {"a": weights["a"], "c": weights["b"]},
        {"a": weights["a"].view(2, 3), "b": weights["b"]},
        {"a": weights["a"].flip(0), "b": weights["b"]},
    ]
    assert hash_of(dict(reversed(weights.items()))) == hash_of(weights)
    assert len({hash_of(each) for each in (weights, *others)}) == 4
