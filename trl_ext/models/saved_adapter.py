"""Load a saved adapter on the base that it names."""

from contextlib import nullcontext
from typing import Any

from accelerate.utils import patch_environment, set_seed
from peft import PeftConfig, PeftModel, get_peft_model, load_peft_weights, set_peft_model_state_dict
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoProcessor, AutoTokenizer
from transformers.utils import cached_file

from ..upstream.names import create_model_from_path, is_deepspeed_zero3_enabled
from .adapters import is_adapter
from .weights import base_model_of

_MERGE = "merge it first (`trl-ext merge`), and train the merged model"
# Settings of `use_peft` that a saved adapter has already
_SHAPE = ("r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "target_modules", "modules_to_save")


def base_of(path: str, revision: str | None = None) -> tuple[str, str | None]:
    """
    Return path and revision of the base that an adapter names; a model that is no adapter is its own base.

    Raises:
        ValueError: the adapter names no base.
    """
    if not is_adapter(path, revision):
        return path, revision
    config = PeftConfig.from_pretrained(path, revision=revision)
    if not config.base_model_name_or_path:
        raise ValueError(
            f"{path} is an adapter that names no base: write the base into its adapter_config.json as "
            "`base_model_name_or_path`"
        )
    return config.base_model_name_or_path, config.revision


def load_config(path: str, revision: str | None = None, **kwargs: Any) -> Any:
    """Load the configuration of a model; for an adapter, load its base's configuration."""
    path, revision = base_of(path, revision)
    return AutoConfig.from_pretrained(path, revision=revision, **kwargs)


def load_tokenizer(path: str, revision: str | None = None, auto: Any = AutoTokenizer, **kwargs: Any) -> Any:
    """
    Load a model's tokenizer, or with `auto=AutoProcessor` its processor.

    For an adapter that was saved without a tokenizer, load its base's tokenizer.
    """
    if is_adapter(path, revision):
        try:
            cached_file(path, "tokenizer_config.json", revision=revision)
        except OSError:  # plain PEFT saves none
            path, revision = base_of(path, revision)
    return auto.from_pretrained(path, revision=revision, **kwargs)


def has_head(path: str, revision: str | None = None) -> bool:
    """Return whether `path` is an adapter of a sequence classifier; PEFT saves such an adapter with its head."""
    return is_adapter(path, revision) and PeftConfig.from_pretrained(path, revision=revision).task_type == "SEQ_CLS"


def load_adapted(
    path: str, revision: str | None = None, *, is_classifier: bool = False, is_trainable: bool = False, **kwargs: Any
) -> Any:
    """
    Load an adapter on the base that it names, unmerged.

    Args:
        path: folder or hub name of the adapter.
        revision: revision of the adapter; the base's revision is read from the adapter's configuration.
        is_classifier: load a sequence classifier of one label. If the adapter is a language model's, it gets a new
            head, which must be trained and is saved with it; so `is_trainable` must be set.
        is_trainable: whether the adapter will be trained further.
        **kwargs: passed to the base's `from_pretrained`.

    Raises:
        ValueError: the adapter is for another task, names no base, names a base that cannot be loaded, or does not
            fit its base; or it would have to be merged before it is trained further.
    """
    config = PeftConfig.from_pretrained(path, revision=revision)
    base, base_revision = base_of(path, revision)
    kind = config.task_type or "CAUSAL_LM"
    if kind != ("SEQ_CLS" if is_classifier else "CAUSAL_LM") and not (kind == "CAUSAL_LM" and is_trainable):
        what = "a sequence classifier" if is_classifier else "a causal language model"
        raise ValueError(f"{path} is an adapter of task type {kind}, but {what} is needed here: give another model")
    auto: Any = AutoModelForSequenceClassification if is_classifier else None
    labels = {"num_labels": 1} if is_classifier else {}
    try:
        # Under FSDP, transformers would load a head that the base lacks on the first process alone
        with patch_environment(FSDP_CPU_RAM_EFFICIENT_LOADING="false") if is_classifier else nullcontext():
            model = create_model_from_path(base, auto, revision=base_revision or "main", **labels, **kwargs)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path} is an adapter of {base}, but this base cannot be loaded ({str(error).splitlines()[0]}): correct "
            "`base_model_name_or_path` in its adapter_config.json"
        ) from error
    weights = load_peft_weights(path, device="cpu", revision=revision)
    is_new_head = is_classifier and kind == "CAUSAL_LM"
    if is_new_head:
        config.task_type, config.modules_to_save = "SEQ_CLS", [*(config.modules_to_save or []), "score"]
    embeddings = _saved_embeddings(model, weights)
    if embeddings and is_trainable:
        raise ValueError(
            f"{path} was saved with its own embeddings ({embeddings[0]}), as happens if tokens were added: {_MERGE}"
        )
    fit_vocabulary(model, weights)
    is_whole = not is_deepspeed_zero3_enabled()  # ZeRO-3 gathers parameters of one dtype only
    if is_new_head and not is_whole:
        raise ValueError(f"{path} cannot get a head under ZeRO-3: {_MERGE}")
    try:
        if is_new_head:  # PEFT cannot load a classifier's adapter without a head
            config.inference_mode, config.init_lora_weights = False, True
            weights["base_model.model.score.weight"] = model.score.weight.detach().clone()
            adapted = get_peft_model(model, config, autocast_adapter_dtype=is_whole)
        else:
            adapted = PeftModel.from_pretrained(
                model,
                path,
                revision=revision,
                config=config,
                is_trainable=is_trainable,
                autocast_adapter_dtype=is_whole,
            )
        if is_whole and not config.is_prompt_learning:
            result: Any = set_peft_model_state_dict(adapted, weights)  # tells what PEFT only warns of, or passes over
            missing = [key for key in result.missing_keys if "default" in key.split(".")]
            if missing or result.unexpected_keys:
                raise ValueError(f"missing {missing[:2]}, unexpected {result.unexpected_keys[:2]}")
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"{path} does not fit its base {base}: {str(error).strip()[:300]}") from error
    adapted.adapter_path = path  # the report of a training run compares with what is recorded at this path
    return adapted


def load_merged(path: str, **kwargs: Any) -> Any:
    """
    Load a causal language model's adapter, merged into the base that it names; `kwargs` are [`load_adapted`]'s.

    Under ZeRO-3 the adapter stays unmerged.
    """
    model = load_adapted(path, **kwargs)
    if is_deepspeed_zero3_enabled():  # no process has a whole weight to merge into
        return model
    return merge(model)


def merge(model: Any) -> Any:
    """Merge an adapter into its base, and return the base. If it changes one of two tied weights, untie them first."""
    base = base_model_of(model)
    ends = base.get_input_embeddings(), base.get_output_embeddings()
    is_adapted = any(hasattr(end, "base_layer") for end in ends)
    if is_adapted and ends[1] is not None and ends[0].weight is ends[1].weight:
        head = getattr(ends[1], "base_layer", ends[1])
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
        base.config.get_text_config().tie_word_embeddings = base.config.tie_word_embeddings = False
        base.all_tied_weights_keys = {}  # else transformers would save one of the two
    return model.merge_and_unload(safe_merge=True)


def fit_vocabulary(model: Any, weights: dict[str, Tensor]) -> None:
    """Resize a base's embeddings to the size of the embeddings in an adapter's `weights`, if there are any."""
    for name in _saved_embeddings(model, weights):
        if len(weights[name]) != model.get_input_embeddings().weight.shape[0]:
            model.resize_token_embeddings(len(weights[name]))


def _saved_embeddings(model: Any, weights: dict[str, Tensor]) -> list[str]:
    """Return the names under which an adapter's file has embeddings or an LM head of its own."""
    own = [model.get_input_embeddings(), model.get_output_embeddings()]
    names = [name for name, module in model.named_modules() if any(module is each for each in own)]
    return [key for key in weights for name in names if key == f"base_model.model.{name}.weight"]


def load_to_train(
    model: Any,
    args: Any,
    processing_class: Any = None,
    peft_config: Any = None,
    quantization_config: Any = None,
    *,
    is_classifier: bool = False,
) -> tuple[Any, Any]:
    """
    If `model` is the path of an adapter, load the adapter, to train it further, and its tokenizer.

    The base is frozen, and quantised if `quantization_config` is given. The adapter keeps its own settings:
    `peft_config` may repeat them, but not change them.

    Returns:
        Two values for a trainer, the model and its tokenizer or processor. If `model` is not the path of an adapter,
        they are `model` and `processing_class`, unchanged.

    Raises:
        ValueError: `peft_config` has another setting than the adapter; or see [`load_adapted`].
    """
    kwargs = dict(getattr(args, "model_init_kwargs", None) or {})
    revision = kwargs.pop("revision", None)
    if not is_adapter(model, revision):
        return model, processing_class
    config = PeftConfig.from_pretrained(model, revision=revision)
    for name in _SHAPE if peft_config is not None else ():
        asked, has = getattr(peft_config, name, None), getattr(config, name, None)
        if isinstance(has, (list, set)) and isinstance(asked, (list, set)):
            asked, has = sorted(asked), sorted(has)
        # PEFT saves the modules that "all-linear" or a pattern matched, not the text
        if asked != has and asked is not None and not (name == "target_modules" and isinstance(asked, str)):
            raise ValueError(
                f"{model} is an adapter with {name}={has!r}, and training it keeps that, but you ask for "
                f"{name}={asked!r}: leave out `use_peft` (`peft_config`) and its settings; or, to train a new "
                f"adapter, {_MERGE}"
            )
    trusted = {"trust_remote_code": getattr(args, "trust_remote_code", False)}
    if quantization_config is not None:
        kwargs["quantization_config"] = quantization_config
    if args is not None and args.distributed_state.distributed_type in ("MULTI_GPU", "DEEPSPEED"):
        kwargs["device_map"] = None  # as TRL: "auto" fails
    if is_classifier and args is not None:
        set_seed(args.seed)  # a new head is drawn
    adapted = load_adapted(model, revision, is_classifier=is_classifier, is_trainable=True, **trusted | kwargs)
    if processing_class is None:
        auto = AutoTokenizer if is_classifier else AutoProcessor
        processing_class = load_tokenizer(model, revision, auto, **trusted)
    return adapted, processing_class
