"""Load a critic that is a model of its own: a sequence classifier with one label, plain or with an adapter."""

from typing import Any

from peft import LoraConfig, get_peft_model

from ..models.adapters import check_config, check_head, is_adapter
from ..models.classifier import check_one_label, zero_
from ..models.loading import whole_on_each_process
from ..models.saved_adapter import has_head, load_adapted
from ..models.weights import base_model_of
from ..rewards.model import load_classifier


def load_critic(path: str, peft_config: LoraConfig | None = None, **kwargs: Any) -> tuple[Any, str]:
    """
    Load the model from which the training of a critic starts.

    Args:
        path: one of the following.

            - A causal language model: its backbone gets a head of zeros, so that V = 0 everywhere, as in PPOTrainer.
            - A reward model: it keeps its head.
            - An adapter of either: this adapter is trained further; if it has no head, it gets one of zeros.
        peft_config: configuration of a new adapter, which is trained and saved together with the head. None trains the
            whole model, or the adapter at `path`.
        **kwargs: arguments of `from_pretrained`.

    Returns:
        The critic, and a phrase that says what it was made from.

    Raises:
        ValueError: the model is not a sequence classifier with one label, its base is quantised, or `peft_config` is
            given for a `path` that is an adapter already.
    """
    if is_adapter(path):
        if peft_config is not None:
            raise ValueError(f"{path} is already an adapter, and training continues with it: leave out `use_peft`")
        is_new = not has_head(path, kwargs.get("revision"))
        if not is_new:
            check_head(path)
        with whole_on_each_process():
            critic = load_adapted(path, is_classifier=True, is_trainable=True, **kwargs)
        check_standalone(critic)
        if is_new:
            zero_(base_model_of(critic).score)
        return critic, f"the adapter {path}" + " with a zero head" * is_new
    with whole_on_each_process():  # else only the first process would have the weights of a new head
        critic, found = load_classifier(path, output_loading_info=True, **kwargs)
    check_standalone(critic)
    is_new = any(not key.startswith(f"{critic.base_model_prefix}.") for key in found["missing_keys"])
    if is_new:
        zero_(critic.score)
    if peft_config is not None:
        peft_config.task_type = "SEQ_CLS"
        check_config(peft_config, "peft_config")
        critic = get_peft_model(critic, peft_config)
    return critic, f"{path} with a zero head" if is_new else path


def check_standalone(critic: Any) -> None:
    """Raise if a model is not a sequence classifier with one label, or has a quantised base and cannot be trained."""
    model = base_model_of(critic)
    check_one_label(model, "a critic")
    if getattr(model.config, "quantization_config", None) is not None:
        raise ValueError(
            "the critic's base is quantised, and such a critic cannot be trained alone: load its base unquantised"
        )
