"""Check, add, save and load the adapters of a run."""

import copy
import json
import os
from pathlib import Path
from typing import Any

import safetensors.torch
from accelerate.utils import patch_environment
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
NO_HEAD = "{} has no `score` head: give the adapter of a sequence classifier, because it is saved with its head."
_HEAD = "base_model.model.score."

# `init_lora_weights` that leave the base weights, and so the reference, as they are
_KEEP_THE_BASE = (True, False, "gaussian", "orthogonal", "eva")


# ---- Checks ----


def check_config(config: Any, name: str, shares_base: bool = True) -> None:
    """
    Raise a `ValueError` for the configuration of an adapter that cannot be used.

    Refused are

    - learned prompts;
    - adapters other than LoRA, if actor and critic share a base (`shares_base`);
    - LoRA settings that change the base's weights, since the reference and other adapters need them unchanged.

    `name` is what the error message calls the configuration.
    """
    if config.is_prompt_learning or config.is_adaption_prompt:
        raise ValueError(
            f"`{name}` is a {type(config).__name__}. Its learned prompt would shift the positions where log-probs and "
            "values are read. Use a `LoraConfig`."
        )
    if not isinstance(config, LoraConfig):
        if shares_base:
            raise ValueError(
                f"`{name}` is a {type(config).__name__}, but actor and critic can share a base only with LoRA. Use a "
                "`LoraConfig`, or pass a critic with a base of its own as `value_model=`."
            )
        return
    if config.bias != "none":
        raise ValueError(
            f"`{name}` has bias={config.bias!r}, which trains the base's biases and so changes the reference. Use "
            "bias='none'."
        )
    if config.init_lora_weights not in _KEEP_THE_BASE or config.layer_replication:
        what = "layer_replication" if config.layer_replication else f"init_lora_weights={config.init_lora_weights!r}"
        raise ValueError(
            f"`{name}` has {what}, which changes the base, so the base alone is no longer the reference. Use "
            "init_lora_weights=True without layer_replication, or merge that adapter first (`recipes/merge.py`)."
        )


def check_modules(policy: Any, config: LoraConfig, name: str) -> None:
    """Raise a `ValueError` for target modules that the policy lacks, and for adapters on its embeddings or LM head."""
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
                f"`{name}` targets {sorted(missing)}, which {type(base).__name__} does not have. Choose among "
                f"{sorted(there)}."
            )
    for what, module in (("embeddings", base.get_input_embeddings()), ("LM head", base.get_output_embeddings())):
        if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
            raise ValueError(
                f"`{name}` adapts the {what} ({type(module).__name__}), but log-probs are computed with the base's "
                f"{what}. Leave it out of target_modules, modules_to_save and trainable_token_indices. If an SFT "
                "adapter changes it, merge that adapter first (`recipes/merge.py`) and train a new one."
            )


def prepare_peft_model(model: Any, shares_base: bool) -> None:
    """Make the adapter `default` of a user's PeftModel trainable; raise a `ValueError` if we cannot train it."""
    if POLICY not in model.peft_config:
        names = list(model.peft_config)
        raise ValueError(
            f"`model` has the adapters {names}, but the trained one must have the name {POLICY!r}. Load it with "
            "`PeftModel.from_pretrained(base, path, is_trainable=True)`, without `adapter_name`."
        )
    reserved = [name for name in model.peft_config if name in (REFERENCE, CRITIC) or name.startswith("reward_")]
    if reserved:
        raise ValueError(
            f"`model` already has the adapters {reserved}, but the trainer uses these names itself. If this model was "
            "passed to a trainer before, load it again."
        )
    if any(isinstance(layer, BaseTunerLayer) and layer.merged for layer in model.modules()):
        raise ValueError("`model` has its adapter merged into the base. Call `model.unmerge_adapter()` first.")
    check_config(model.peft_config[POLICY], "model.peft_config['default']", shares_base)
    model.peft_config[POLICY].inference_mode = False  # as PEFT sets it without `is_trainable=True`
    model.set_adapter(POLICY)
    base = [n for n, p in model.named_parameters() if p.requires_grad and f".{POLICY}" not in n]
    if base:
        raise ValueError(
            f"`model` has trainable weights outside its adapter ({base[0]} and {len(base) - 1} more), and the "
            "reference shares these. Freeze them (`requires_grad_(False)`)."
        )


# ---- The critic ----


def add_critic(policy: Any, config: LoraConfig | None) -> None:
    """
    Add the critic's adapter to the policy's base, in the dtype of the policy's adapter.

    If `config` is None, the critic's adapter has the settings of the policy's adapter.
    """
    if config is None:
        config = copy.deepcopy(policy.peft_config[POLICY])
        config.modules_to_save = None  # a critic has no use for these modules
        config.init_lora_weights = True
    else:
        config = copy.deepcopy(config)  # PEFT writes into it
        check_config(config, "critic_peft_config")
        if config.modules_to_save:
            raise ValueError(
                f"`critic_peft_config` has modules_to_save={config.modules_to_save}. Leave it out: the critic's head "
                "is trained anyway, and other modules belong in target_modules."
            )
        check_modules(policy, config, "critic_peft_config")
    config.inference_mode = False
    _add(policy, CRITIC, config, "critic_peft_config")


def _add(policy: Any, name: str, config: LoraConfig, what: str) -> None:
    first = policy.peft_config[POLICY]
    config.task_type = first.task_type  # else PEFT looks for a head to train
    # PEFT sets the base's name when it wraps or saves a model, but not when it adds an adapter
    config.base_model_name_or_path = first.base_model_name_or_path or base_model_of(policy).name_or_path or None
    try:
        policy.add_adapter(name, config)
    except ValueError as error:
        raise ValueError(f"`{what}` does not fit {type(base_model_of(policy)).__name__}: {error}") from error
    check_modules(policy, config, what)
    policys = {n: p for n, p in policy.named_parameters() if POLICY in n.split(".")}
    dtype = next(iter(policys.values())).dtype
    for parameter_name, parameter in policy.named_parameters():
        if name in parameter_name.split("."):
            twin = policys.get(parameter_name.replace(f".{name}", f".{POLICY}"))
            parameter.data = parameter.data.to(dtype if twin is None else twin.dtype)


def copy_adapter(policy: Any, source: str, target: str) -> bool:
    """Copy adapter `source` to adapter `target` if shapes and scalings are equal; return whether it was copied."""
    a, b = (get_peft_model_state_dict(policy, adapter_name=n, save_embedding_layers=False) for n in (source, target))
    layers: list[Any] = [layer for layer in policy.modules() if isinstance(layer, BaseTunerLayer)]
    scalings = [[layer.scaling.get(name) for layer in layers] for name in (source, target)]
    if scalings[0] != scalings[1] or {n: t.shape for n, t in a.items()} != {n: t.shape for n, t in b.items()}:
        return False
    set_peft_model_state_dict(policy, a, adapter_name=target)
    return True


def adapter_facts(policy: Any) -> dict[str, Any]:
    """Return the adapters' settings, and the reference adapter's hash, if any: a run resumes only with equal ones."""
    # These settings tell where an adapter came from, or are set by PEFT while the adapter is used
    left_out = ("base_model_name_or_path", "revision", "inference_mode", "task_type", "auto_mapping", "peft_version")
    facts: dict[str, Any] = {}
    for name, config in policy.peft_config.items():
        settings = {key: value for key, value in config.to_dict().items() if key not in left_out}
        # Sorted, since sets have no order
        facts |= {f"adapter {name} {key}": sorted(v) if isinstance(v, set) else v for key, v in settings.items()}
    if REFERENCE in policy.peft_config:
        reference = get_peft_model_state_dict(policy, adapter_name=REFERENCE)
        facts["reference adapter's weights"] = f"xxh3:{hash_of(reference)}"
    return facts


# ---- Files ----


def is_adapter(path: Any, revision: str | None = None) -> bool:
    """Return whether `path` is the folder or hub name of an adapter; False if it is no string."""
    try:
        return isinstance(path, str) and find_adapter_config_file(path, revision=revision) is not None
    except OSError:  # nothing is there: loading it will say so
        return False


def save_classifier(policy: Any, name: str, head: dict[str, Tensor], folder: str, state_dict: dict | None) -> None:
    """
    Save the policy's adapter `name` with the weights of a `score` head, as PEFT saves a sequence classifier.

    `state_dict` holds the policy's gathered weights, if they are sharded.
    """
    config = copy.deepcopy(policy.peft_config[name])
    config.task_type, config.modules_to_save, config.inference_mode = "SEQ_CLS", ["score"], True
    os.makedirs(folder, exist_ok=True)
    config.save_pretrained(folder)
    weights = get_peft_model_state_dict(policy, state_dict=state_dict, adapter_name=name, save_embedding_layers=False)
    weights |= {f"{_HEAD}{n.removeprefix('score.')}": p for n, p in head.items()}
    weights = {n: p.detach().cpu().contiguous() for n, p in weights.items()}
    safetensors.torch.save_file(weights, os.path.join(folder, "adapter_model.safetensors"), metadata={"format": "pt"})


def load_adapter(policy: Any, name: str, folder: str) -> dict[str, Tensor]:
    """
    Load the weights in `folder` into the policy's adapter `name`, without freezing it.

    Return the weights of the score head in `folder`; {} if there is no head.

    Raises:
        ValueError: the weights do not fit the adapter.
    """
    weights = load_peft_weights(folder, device="cpu")
    head = {key.removeprefix(_HEAD): weights.pop(key) for key in list(weights) if key.startswith(_HEAD)}
    result: Any = set_peft_model_state_dict(policy, weights, adapter_name=name)
    missing = [key for key in result.missing_keys if name in key.split(".")]
    if missing or result.unexpected_keys:
        raise ValueError(
            f"The adapter in {folder} does not fit the adapter {name!r} of this run (missing: {missing[:3]}, "
            f"unexpected: {result.unexpected_keys[:3]}). Use the LoRA configuration that it was trained with."
        )
    return head


def load_separately(path: str, **kwargs: Any) -> PreTrainedModel:
    """
    Load a sequence classifier of one label that was saved as an adapter, and merge the adapter into its own base.

    Under ZeRO-3 the adapter stays unmerged.
    """
    check_head(path)
    # Under FSDP, transformers would load the head, which the base lacks, on the first process alone
    with patch_environment(FSDP_CPU_RAM_EFFICIENT_LOADING="false"):
        model = AutoPeftModelForSequenceClassification.from_pretrained(path, num_labels=1, **kwargs)
    if is_deepspeed_zero3_enabled():  # no process has a whole weight to merge into
        return model
    model = model.merge_and_unload()
    model.config.name_or_path = model.name_or_path = path
    return model


class OneAdapter(nn.Module):
    """Run one sequence classifier, an adapter with a head, on a [`SharedBase`]."""

    def __init__(self, shared: "SharedBase", name: str):
        super().__init__()
        self.model, self.config, self.shared, self.name = shared.model, shared.model.config, shared, name

    @property
    def device(self) -> Any:
        """Return the device of the base."""
        return self.model.device

    def forward(self, **inputs: Any) -> Any:
        with self.shared.switch.use(self.name):
            return self.model(**inputs)


class SharedBase:
    """Load several sequence classifiers of one label, saved as adapters of one base, and load this base only once."""

    def __init__(self) -> None:
        self.model: Any = None
        self.base: Any = None
        self.switch: Any = None

    def add(self, path: str, **kwargs: Any) -> OneAdapter:
        """
        Load the adapter in `path`; the first call also loads its base, with `kwargs` for `from_pretrained`.

        Raises:
            ValueError: the adapter has another base than the first one, or cannot share a base.
        """
        base = base_named_by(path)
        if self.model is None:
            self.base, names = base, []
            load = AutoPeftModelForSequenceClassification.from_pretrained
            self.model = load(path, adapter_name="member_0", num_labels=1, **kwargs)
        elif base is None or base != self.base:
            raise ValueError(f"{path} is not an adapter on {self.base}, the first adapter's base: load it separately")
        else:
            names = list(self.model.peft_config)
            self.model.load_adapter(path, f"member_{len(names)}")
        self.switch = AdapterSwitch(self.model)  # made anew, since each adapter may adapt other layers
        return OneAdapter(self, f"member_{len(names)}")


def base_named_by(path: str) -> tuple[Any, ...] | None:
    """Return the name, revision and hash of an adapter's base, three values; None if the adapter cannot share it."""
    config = PeftConfig.from_pretrained(path)
    try:
        check_config(config, path)
    except ValueError:
        return None
    return config.base_model_name_or_path, config.revision, _recorded_base(path).get("weights")


def check_head(path: str) -> None:
    """Raise a `ValueError` if neither an adapter nor its base has a `score` head: loading would make a random one."""
    if any(key.startswith(_HEAD) for key in load_peft_weights(path, device="cpu")):
        return
    config = PeftConfig.from_pretrained(path)
    base = AutoConfig.from_pretrained(config.base_model_name_or_path, revision=config.revision)
    if "CausalLM" in (base.architectures or [""])[0]:
        raise ValueError(NO_HEAD.format(path))


# ---- Which base an adapter was trained on ----


def quantization_of(model: Any) -> str:
    """Return how a model's base is quantised, such as "bitsandbytes nf4"; "none" if it is not."""
    base = base_model_of(model)
    quantization = getattr(base.config, "quantization_config", None)
    settings = quantization if isinstance(quantization, dict) else getattr(quantization, "to_dict", dict)()
    kind = settings.get("quant_method", "none")
    return f"{getattr(kind, 'value', kind)} {settings.get('bnb_4bit_quant_type', '')}".strip()


def base_fingerprint(model: Any) -> dict[str, str]:
    """Return what identifies a model's base: a hash of its backbone's `weights`, and its `quantization`."""
    return {"weights": weights_hash(base_model_of(model).base_model), "quantization": quantization_of(model)}


def save_base_fingerprint(
    model: Any, output_dir: str | Path, path: str | None = None, revision: str | None = None
) -> None:
    """
    Write a file beside a LoRA adapter that says which base the adapter was trained on.

    `PPOTrainer` reads the file to tell whether its policy has the same base (`share_reward_base`). Call this function
    on every process.

    Args:
        model: the model with the adapter.
        output_dir: folder of the adapter.
        path, revision: what the base was loaded from. Bases from the hub are compared by name and commit.
    """
    fingerprint = {"base": hub_identity(path, revision), **base_fingerprint(model)}
    if int(os.environ.get("RANK", "0")) == 0:
        (Path(output_dir) / FINGERPRINT).write_text(json.dumps(fingerprint, indent=2))


def _recorded_base(folder: str) -> dict[str, str]:
    """Read what [`save_base_fingerprint`] wrote beside an adapter; {} if it wrote nothing."""
    record = Path(folder) / FINGERPRINT
    return json.loads(record.read_text()) if record.is_file() else {}


def names_base(folder: str, policy: Any, hub_base: str | None) -> bool:
    """Return whether the adapter in `folder` was trained on `hub_base`, quantised as the policy's base is."""
    if hub_base is None:
        return False
    recorded = _recorded_base(folder)
    return (recorded.get("base"), recorded.get("quantization")) == (hub_base, quantization_of(policy))


def why_not_shared(policy: Any, path: str, own: dict[str, str], assume_quantization: bool) -> str | None:
    """
    Return why the adapter in `path` cannot use the policy's base; None if it can.

    `own` is the fingerprint of the policy's base, or empty if the adapter names that base. If the policy is quantised
    and no base is recorded beside the adapter, the answer is None only with `assume_quantization`.
    """
    config = PeftConfig.from_pretrained(path)
    try:
        check_config(config, path)
    except ValueError as error:
        return str(error)
    if not own:
        return None
    if theirs := _recorded_base(path):
        if theirs["quantization"] != own["quantization"]:
            return f"its base's quantisation was {theirs['quantization']}, the policy's is {own['quantization']}"
        return None if theirs["weights"] == own["weights"] else "its base has other weights than the policy's"
    if own["quantization"] != "none":
        return (
            None
            if assume_quantization
            else f"the policy is quantised, and the adapter has no {FINGERPRINT} to compare bases with"
        )
    if is_deepspeed_zero3_enabled():
        return f"the adapter has no {FINGERPRINT}, and under ZeRO-3 its base cannot be loaded for a comparison"
    if not config.base_model_name_or_path:
        return f"the adapter names no base, and has no {FINGERPRINT} (`save_base_fingerprint`)"
    base = AutoModel.from_pretrained(config.base_model_name_or_path, revision=config.revision, dtype=policy.dtype)
    same = base_fingerprint(base)["weights"] == own["weights"]
    return None if same else f"its base {config.base_model_name_or_path} has other weights than the policy's"


def load_head(policy: Any, name: str, folder: str) -> nn.Linear:
    """Load the weights of adapter `name` from a folder; return the folder's score head, or raise if it has none."""
    weights = load_adapter(policy, name, folder)
    if "weight" not in weights:
        raise ValueError(NO_HEAD.format(folder))
    head = nn.Linear(weights["weight"].shape[1], len(weights["weight"]), bias="bias" in weights)
    head.load_state_dict(weights)
    return head


def add_reward(policy: Any, name: str, path: str) -> nn.Linear:
    """Add the adapter in `path` to the policy under `name`, frozen; return its score head."""
    config = PeftConfig.from_pretrained(path)
    config.modules_to_save, config.lora_dropout, config.inference_mode = None, 0.0, True
    _add(policy, name, config, path)
    return load_head(policy, name, path).to(base_model_of(policy).dtype).requires_grad_(False)
