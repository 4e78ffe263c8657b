"""The adapters of a run: which ones can be right, and how they are added, saved and loaded."""

import copy
import json
import os
from pathlib import Path
from typing import Any

import safetensors.torch
from accelerate.utils import disable_fsdp_ram_efficient_loading
from peft import (
    AutoPeftModelForSequenceClassification,
    LoraConfig,
    PeftConfig,
    get_peft_model_state_dict,
    load_peft_weights,
    set_peft_model_state_dict,
)
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedModel

from ..upstream.names import (
    AuxiliaryTrainingWrapper,
    BaseTunerLayer,
    find_adapter_config_file,
    is_deepspeed_zero3_enabled,
)
from .adapter_switch import CRITIC, POLICY, REFERENCE, AdapterSwitch
from .identity import hash_of, hub_identity, weights_hash
from .weights import base_model_of

FINGERPRINT = "trl_ext_base.json"
_HEAD = "base_model.model.score."

# Ways to initialise LoRA that leave the base weights, and so the reference, as they are
_KEEP_THE_BASE = (True, False, "gaussian", "orthogonal", "eva")


# ---- Checks ----


def check_config(config: Any, name: str, shares_base: bool = True) -> None:
    """Refuse an adapter that would not leave the base as it is, for the reference and for others that share it."""
    if config.is_prompt_learning or config.is_adaption_prompt:
        raise ValueError(
            f"`{name}` is a {type(config).__name__}, whose learned prompt would shift what log-probs and values are "
            "read from: use a `LoraConfig`."
        )
    if not isinstance(config, LoraConfig):
        if shares_base:
            raise ValueError(
                f"`{name}` is a {type(config).__name__}: actor and critic can share one base by LoRA only. Use a "
                "`LoraConfig`, or pass a critic of its own as `value_model=`."
            )
        return
    if config.bias != "none":
        raise ValueError(
            f"`{name}` has bias={config.bias!r}, which trains the base's own biases, and they are the reference's, "
            "too: use bias='none'."
        )
    if config.init_lora_weights not in _KEEP_THE_BASE or config.layer_replication:
        what = "layer_replication" if config.layer_replication else f"init_lora_weights={config.init_lora_weights!r}"
        raise ValueError(
            f"`{name}` has {what}, which changes the base, so that the base without adapters is no longer the "
            "reference: use init_lora_weights=True without layer_replication, or merge that adapter first "
            "(`recipes/merge.py`)."
        )


def check_modules(policy: Any, config: LoraConfig, name: str) -> None:
    """Refuse target modules that do not exist; an adapter on the embeddings or the LM head."""
    base = base_model_of(policy)
    if isinstance(config.target_modules, (list, set, tuple)):
        modules = [module.replace(".base_layer", "") for module, _ in base.named_modules()]
        missing = [t for t in config.target_modules if not any(m == t or m.endswith(f".{t}") for m in modules)]
        if missing:
            there = {
                module.removesuffix(".base_layer").rsplit(".")[-1]
                for module, layer in base.named_modules()
                if getattr(getattr(layer, "weight", None), "ndim", 0) == 2 and "lora_" not in module
                if layer is not base.get_input_embeddings() and layer is not base.get_output_embeddings()
            }
            raise ValueError(
                f"`{name}` targets {sorted(missing)}, which {type(base).__name__} does not have; it has "
                f"{sorted(there)}."
            )
    for what, module in (("embeddings", base.get_input_embeddings()), ("LM head", base.get_output_embeddings())):
        if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
            raise ValueError(
                f"`{name}` adapts the {what} ({type(module).__name__}), which log-probs are computed from directly: "
                "leave it out of target_modules, modules_to_save and trainable_token_indices. If an SFT adapter has "
                "it, merge that first (`recipes/merge.py`) and train a new one."
            )


def prepare_peft_model(model: Any, shares_base: bool) -> None:
    """Check a PeftModel that a user passes, and make its adapter `default` trainable."""
    if POLICY not in model.peft_config:
        names = list(model.peft_config)
        raise ValueError(
            f"`model` has the adapters {names}, but the one that is trained must be named {POLICY!r}: load it with "
            f"`PeftModel.from_pretrained(base, path, is_trainable=True)`, without `adapter_name`."
        )
    reserved = [name for name in model.peft_config if name in (REFERENCE, CRITIC) or name.startswith("reward_")]
    if reserved:
        raise ValueError(
            f"`model` already has the adapters {reserved}, names that the trainer gives itself (has it been passed to "
            "a trainer before?): load it anew."
        )
    if any(isinstance(layer, BaseTunerLayer) and layer.merged for layer in model.modules()):
        raise ValueError("`model` has its adapter merged into the base: call `model.unmerge_adapter()` first.")
    check_config(model.peft_config[POLICY], "model.peft_config['default']", shares_base)
    model.peft_config[POLICY].inference_mode = False  # as PEFT sets it without `is_trainable=True`
    model.set_adapter(POLICY)
    base = [n for n, p in model.named_parameters() if p.requires_grad and f".{POLICY}" not in n]
    if base:
        raise ValueError(
            f"`model` has trainable weights outside its adapter ({base[0]} and {len(base) - 1} more), and they are "
            "the reference's, too: freeze them (`requires_grad_(False)`)."
        )


# ---- The critic ----


def add_critic(policy: Any, config: LoraConfig | None) -> None:
    """Add the critic's adapter, in the dtype of the policy's own; by default with a copy of its config."""
    if config is None:
        config = copy.deepcopy(policy.peft_config[POLICY])
        config.modules_to_save = None  # those have no place in a value
        config.init_lora_weights = True
    else:
        config = copy.deepcopy(config)  # PEFT writes into it
        check_config(config, "critic_peft_config")
        if config.modules_to_save:
            raise ValueError(
                f"`critic_peft_config` has modules_to_save={config.modules_to_save}: the critic's head is trained "
                "anyway, and what else it needs belongs into target_modules."
            )
        check_modules(policy, config, "critic_peft_config")
    config.inference_mode = False
    _add(policy, CRITIC, config, "critic_peft_config")


def _add(policy: Any, name: str, config: LoraConfig, what: str) -> None:
    first = policy.peft_config[POLICY]
    config.task_type = first.task_type  # else PEFT looks for a head to train
    # PEFT writes it when it makes a model, or saves one, but not when it adds an adapter
    config.base_model_name_or_path = first.base_model_name_or_path or base_model_of(policy).name_or_path or None
    try:
        policy.add_adapter(name, config)
    except ValueError as error:
        raise ValueError(f"`{what}` does not fit {type(base_model_of(policy)).__name__}: {error}") from error
    check_modules(policy, config, what)
    own = {n: p for n, p in policy.named_parameters() if POLICY in n.split(".")}
    dtype = next(iter(own.values())).dtype
    for parameter_name, parameter in policy.named_parameters():
        if name in parameter_name.split("."):
            twin = own.get(parameter_name.replace(f".{name}", f".{POLICY}"))
            parameter.data = parameter.data.to(dtype if twin is None else twin.dtype)


def copy_adapter(policy: Any, source: str, target: str) -> bool:
    """Give adapter `target` the weights of `source`, if both scale and shape them alike; whether they do."""
    a, b = (get_peft_model_state_dict(policy, adapter_name=n, save_embedding_layers=False) for n in (source, target))
    layers: list[Any] = [layer for layer in policy.modules() if isinstance(layer, BaseTunerLayer)]
    scalings = [[layer.scaling.get(name) for layer in layers] for name in (source, target)]
    if scalings[0] != scalings[1] or {n: t.shape for n, t in a.items()} != {n: t.shape for n, t in b.items()}:
        return False
    set_peft_model_state_dict(policy, a, adapter_name=target)
    return True


def adapter_facts(policy: Any) -> dict[str, Any]:
    """What a run that goes on must have in common with its beginning: settings, and which reference."""
    # Where it came from, and what PEFT sets by the use that is made of it
    left_out = ("base_model_name_or_path", "revision", "inference_mode", "task_type", "auto_mapping", "peft_version")
    facts: dict[str, Any] = {}
    for name, config in policy.peft_config.items():
        settings = {key: value for key, value in config.to_dict().items() if key not in left_out}
        # Sets have no order
        facts |= {f"adapter {name} {key}": sorted(v) if isinstance(v, set) else v for key, v in settings.items()}
    if REFERENCE in policy.peft_config:
        reference = get_peft_model_state_dict(policy, adapter_name=REFERENCE)
        facts["reference adapter's weights"] = f"xxh3:{hash_of(reference)}"
    return facts


# ---- Files ----


def is_adapter(path: Any) -> bool:
    """Whether this is the name of an adapter, in a folder or on the hub."""
    try:
        return isinstance(path, str) and find_adapter_config_file(path) is not None
    except OSError:  # neither: whoever loads it says so
        return False


def save_classifier(policy: Any, name: str, head: dict[str, Tensor], folder: str, state_dict: dict | None) -> None:
    """Save an adapter and its head (the weights of a module with a `score`) as PEFT saves a sequence classifier."""
    config = copy.deepcopy(policy.peft_config[name])
    config.task_type, config.modules_to_save, config.inference_mode = "SEQ_CLS", ["score"], True
    os.makedirs(folder, exist_ok=True)
    config.save_pretrained(folder)
    weights = get_peft_model_state_dict(policy, state_dict=state_dict, adapter_name=name, save_embedding_layers=False)
    weights |= {f"{_HEAD}{n.removeprefix('score.')}": p for n, p in head.items()}
    weights = {n: p.detach().cpu().contiguous() for n, p in weights.items()}
    safetensors.torch.save_file(weights, os.path.join(folder, "adapter_model.safetensors"), metadata={"format": "pt"})


def load_adapter(policy: Any, name: str, folder: str) -> dict[str, Tensor]:
    """Load the weights of an adapter that is there (PEFT's own function would freeze it); those of its head."""
    weights = load_peft_weights(folder, device="cpu")
    head = {key.removeprefix(_HEAD): weights.pop(key) for key in list(weights) if key.startswith(_HEAD)}
    result: Any = set_peft_model_state_dict(policy, weights, adapter_name=name)
    missing = [key for key in result.missing_keys if name in key.split(".")]
    if missing or result.unexpected_keys:
        raise ValueError(
            f"The adapter in {folder} does not fit the adapter {name!r} of this run (missing: {missing[:3]}, "
            f"unexpected: {result.unexpected_keys[:3]}): use the configuration that it was trained with."
        )
    return head


def load_separately(path: str, **kwargs: Any) -> PreTrainedModel:
    """A sequence classifier of one label saved as an adapter, on its own base; as one plain model, if that can be."""
    # Under FSDP, transformers leaves heads that the base lacks to be sent by the first process, with what is sharded
    efficient = os.environ.get("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")
    disable_fsdp_ram_efficient_loading()
    try:
        model = AutoPeftModelForSequenceClassification.from_pretrained(path, num_labels=1, **kwargs)
    finally:
        os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = efficient
    if is_deepspeed_zero3_enabled():  # there is no whole weight to add the adapter to
        return model
    model = model.merge_and_unload()
    model.config.name_or_path = model.name_or_path = path
    return model


class OneAdapter(nn.Module):
    """A sequence classifier: one of several adapters, each with its head, on a base."""

    def __init__(self, shared: "SharedBase", name: str):
        super().__init__()
        self.model, self.config, self.shared, self.name = shared.model, shared.model.config, shared, name

    @property
    def device(self) -> Any:
        """Where the base is."""
        return self.model.device

    def forward(self, **inputs: Any) -> Any:
        with self.shared.switch.use(self.name):
            return self.model(**inputs)


class SharedBase:
    """The base of several sequence classifiers of one label that were saved as adapters of it, loaded once."""

    def __init__(self) -> None:
        self.model: Any = None
        self.base: Any = None
        self.switch: Any = None

    def add(self, path: str, **kwargs: Any) -> OneAdapter:
        """Load one more adapter, the first with the base; `kwargs` are those of `from_pretrained`."""
        base = base_named_by(path)
        if self.model is None:
            self.base, names = base, []
            load = AutoPeftModelForSequenceClassification.from_pretrained
            self.model = load(path, adapter_name="member_0", num_labels=1, **kwargs)
        elif base is None or base != self.base:
            raise ValueError(f"{path} is no adapter of the base that it is to share: load it separately")
        else:
            names = list(self.model.peft_config)
            self.model.load_adapter(path, f"member_{len(names)}")
        self.switch = AdapterSwitch(self.model)  # each may adapt other layers
        return OneAdapter(self, f"member_{len(names)}")


def base_named_by(path: str) -> tuple[Any, ...] | None:
    """What names the base of an adapter that can be on a base with others; None if it needs one of its own."""
    config = PeftConfig.from_pretrained(path)
    try:
        check_config(config, path)
    except ValueError:
        return None
    record = Path(path) / FINGERPRINT
    weights = json.loads(record.read_text())["weights"] if record.is_file() else None
    return config.base_model_name_or_path, config.revision, weights


def check_head(path: str) -> None:
    """Raise if neither an adapter nor its base has the head of a sequence classifier: it would be a random one."""
    if any(key.startswith(_HEAD) for key in load_peft_weights(path, device="cpu")):
        return
    config = PeftConfig.from_pretrained(path)
    base = AutoConfig.from_pretrained(config.base_model_name_or_path, revision=config.revision)
    if "CausalLM" in (base.architectures or [""])[0]:
        raise ValueError(f"{path} has no `score` head: it is no sequence classifier that was saved as an adapter.")


# ---- One base for a reward model that was trained as an adapter ----


def quantization_of(model: Any) -> str:
    """Return in words how a model's base is quantised."""
    base = base_model_of(model)
    quantization = getattr(base.config, "quantization_config", None)
    settings = quantization if isinstance(quantization, dict) else getattr(quantization, "to_dict", dict)()
    kind = settings.get("quant_method", "none")
    return f"{getattr(kind, 'value', kind)} {settings.get('bnb_4bit_quant_type', '')}".strip()


def base_fingerprint(model: Any) -> dict[str, str]:
    """Return what tells one base from another: a hash of the backbone's weights, and the quantisation."""
    return {"weights": weights_hash(base_model_of(model).base_model), "quantization": quantization_of(model)}


def save_base_fingerprint(
    model: Any, output_dir: str | Path, path: str | None = None, revision: str | None = None
) -> None:
    """
    Write beside a LoRA adapter which base it was trained on, so that `PPOTrainer` can tell whether its own policy has
    that base (`share_reward_base`). Call it on every process.

    `path` and `revision` are what the base was loaded from: of two bases of the hub, names and commits are compared.
    """
    fingerprint = {"base": hub_identity(path, revision), **base_fingerprint(model)}
    if int(os.environ.get("RANK", "0")) == 0:
        (Path(output_dir) / FINGERPRINT).write_text(json.dumps(fingerprint, indent=2))


def names_base(folder: str, policy: Any, hub_base: str | None) -> bool:
    """Whether the record of an adapter names the policy's base, a model of the hub, and its quantisation."""
    record = Path(folder) / FINGERPRINT
    theirs = json.loads(record.read_text()) if hub_base and record.is_file() else {}
    named = (theirs.get("base"), theirs.get("quantization"))
    return hub_base is not None and named == (hub_base, quantization_of(policy))


def why_not_shared(policy: Any, path: str, own: dict[str, str], assume_quantization: bool) -> str | None:
    """
    Say why the adapter in `path` cannot be right on `policy`'s base; None if it can.

    `own` is the policy's fingerprint, or empty if the adapter names the policy's base.
    """
    config = PeftConfig.from_pretrained(path)
    try:
        check_config(config, path)
    except ValueError as error:
        return str(error)
    if not own:
        return None
    record = Path(path) / FINGERPRINT
    if record.is_file():
        theirs = json.loads(record.read_text())
        if theirs["quantization"] != own["quantization"]:
            return f"its base's quantisation was {theirs['quantization']}, the policy's is {own['quantization']}"
        return (
            None if theirs["weights"] == own["weights"] else "it was trained on other base weights than the policy's"
        )
    if own["quantization"] != "none":
        return None if assume_quantization else f"the policy is quantised, and no {FINGERPRINT} says how its base was"
    if is_deepspeed_zero3_enabled():
        return f"it has no {FINGERPRINT}, and under ZeRO-3 its base cannot be loaded to compare"
    if not config.base_model_name_or_path:
        return f"it names no base, and has no {FINGERPRINT} (`save_base_fingerprint`)"
    base = AutoModel.from_pretrained(config.base_model_name_or_path, revision=config.revision, dtype=policy.dtype)
    same = base_fingerprint(base)["weights"] == own["weights"]
    return None if same else f"its base {config.base_model_name_or_path} has other weights than the policy's"


def load_head(policy: Any, name: str, folder: str) -> nn.Linear:
    """Load the weights of adapter `name`, and the score head that was saved with them."""
    weights = load_adapter(policy, name, folder)
    if "weight" not in weights:
        raise ValueError(f"{folder} has no `score` head: it is no sequence classifier that was saved as an adapter.")
    head = nn.Linear(weights["weight"].shape[1], len(weights["weight"]), bias="bias" in weights)
    head.load_state_dict(weights)
    return head


def add_reward(policy: Any, name: str, path: str) -> nn.Linear:
    """Add the adapter in `path` under `name`, frozen; its score head."""
    config = PeftConfig.from_pretrained(path)
    config.modules_to_save, config.lora_dropout, config.inference_mode = None, 0.0, True
    _add(policy, name, config, path)
    return load_head(policy, name, path).to(base_model_of(policy).dtype).requires_grad_(False)
