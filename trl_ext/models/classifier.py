"""Build sequence classifiers with one label: critics, and reward models on the policy's base."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from ..upstream.names import set_zero3_state
from .adapters import AdapterSwitch
from .weights import base_model_of, tokens_beyond, unpatched_copy, vocabulary_of, whole


def classifier_on(base: Any, head: nn.Module | None = None) -> PreTrainedModel:
    """
    Build a sequence classifier of one label from the backbone of `base`, which is not copied, and `head`.

    If `head` is None, make a head of zeros in float32: bfloat16 would round small updates away.
    """
    config = copy.deepcopy(base.config)
    config.num_labels = 1
    with torch.device("meta"), set_zero3_state():  # only the structure is needed, nothing for ZeRO-3 to partition
        classifier = AutoModelForSequenceClassification.from_config(config)
    setattr(classifier, classifier.base_model_prefix, base.base_model)
    if head is None:
        head = nn.Linear(classifier.score.in_features, 1, bias=classifier.score.bias is not None)
        zero_(head)
    classifier.score = head.to(base.device)
    return classifier


def zero_(head: nn.Module) -> None:
    """Set a head's weights to 0, so that V = 0 everywhere."""
    for parameter in head.parameters():
        with whole(parameter, modifier_rank=0):
            nn.init.zeros_(parameter)


class AdapterClassifier(nn.Module):
    """
    Score with an adapter and a head on the policy's base, as a sequence classifier of one label does.

    Only the head is registered as a submodule: the base belongs to the policy.
    """

    classifier: Any

    def __init__(self, policy: Any, adapters: AdapterSwitch, name: str, head: nn.Module | None = None):
        super().__init__()
        classifier = classifier_on(base_model_of(policy), head)
        self.score = classifier.score
        self.config = classifier.config
        self.adapters = adapters
        self.name = name
        # The base's weights are the policy's: registered twice, they would be sharded and saved twice
        object.__setattr__(self, "classifier", classifier)

    def backbone(self, **inputs: Any) -> Any:
        """Run the layers below the head, with this classifier's adapter active."""
        with self.adapters.use(self.name):
            return self.classifier.base_model(**inputs)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Score (B, L) right-padded rows as the sequence classifier's own forward does; return (B,)."""
        with self.adapters.use(self.name):
            return self.classifier(input_ids=input_ids, attention_mask=attention_mask).logits[:, 0]


def critic_from_policy(policy: nn.Module, load_again: Callable[[], Any] | None = None) -> PreTrainedModel:
    """
    Build a critic on a copy of the policy's backbone with a zero value head: V = 0 everywhere at the start.

    If the policy cannot be copied, `load_again` is called: it loads a sequence classifier with the policy's backbone.
    """
    twin = unpatched_copy(policy, "the critic", load_again)
    critic = twin if hasattr(twin, "score") else classifier_on(twin)
    zero_(critic.score)
    critic.score.to(policy.dtype)
    return critic.requires_grad_(True)


def check_one_label(model: Any, name: str) -> None:
    """Raise a `ValueError` if a model, called `name` in the message, is not a sequence classifier with one label."""
    if not hasattr(getattr(model, "score", None), "weight") or model.config.num_labels != 1:
        raise ValueError(
            f"{name} must be a sequence classifier with a `score` head, with one label, got {type(model).__name__}: "
            "load it by `AutoModelForSequenceClassification` with `num_labels=1`."
        )


def check_critic(critic: Any, tokenizer: Any) -> None:
    """Raise a `ValueError` if `critic` cannot be the critic of a policy with that tokenizer."""
    check_one_label(critic, "`value_model`")
    if unknown := tokens_beyond(vocabulary_of(critic), tokenizer, pads_are_read=False):
        raise ValueError(
            f"`value_model` has no embeddings for tokens that the policy's tokenizer has: {[*unknown.items()][:3]}. "
            "Pass a critic with the same tokenizer, or call `value_model.resize_token_embeddings`."
        )
