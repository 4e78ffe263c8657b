"""Describe a run and its plan, list what is known to go wrong with it, and estimate how long it takes."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from accelerate.commands.config.config_args import load_config_from_file

from ...models import context_of
from ...ppo import prepare_adapters
from .memory import kv_cache_bytes

Stage = Literal["sft", "reward", "pretrain_critic", "ppo", "dpo"]


@dataclass(frozen=True)
class Layout:
    """
    Describe which part of a model each process keeps.

    Args:
        mode: how the run is distributed: `"single"` (not at all), `"ddp"`, `"fsdp2"`, or `"zero0"` to
            `"zero3"`.
        processes, machines: number of processes on all machines together, and number of machines.
        offloads_weights, offloads_optimizer: whether the weights, and whether the optimizer's state, are in the
            machine's memory instead of the GPU's.
        live_parameters: ZeRO-3's `stage3_max_live_parameters`, the most weights that a GPU gathers at once.
        checkpoints_activations: whether FSDP's own activation checkpointing is on.
        accumulation: number of gradient accumulation steps that DeepSpeed's settings fix; None if they fix none.
    """

    mode: str = "single"
    processes: int = 1
    machines: int = 1
    offloads_weights: bool = False
    offloads_optimizer: bool = False
    live_parameters: int = 10**9
    checkpoints_activations: bool = False
    accumulation: int | None = None

    @property
    def is_deepspeed(self) -> bool:
        """Return whether the run uses DeepSpeed."""
        return self.mode.startswith("zero")

    @property
    def casts_weights(self) -> bool:
        """Return whether mixed precision casts the weights themselves; else the model's forward is autocast."""
        return self.is_deepspeed or self.mode == "fsdp2"

    @property
    def shards_weights(self) -> bool:
        """Return whether each process keeps only its part of the weights."""
        return self.mode in ("fsdp2", "zero3")

    @property
    def shards_gradients(self) -> bool:
        """Return whether each process keeps only its part of the gradients."""
        return self.mode in ("fsdp2", "zero2", "zero3")

    @property
    def shards_optimizer(self) -> bool:
        """Return whether each process keeps only its part of the optimizer's state."""
        return self.mode in ("fsdp2", "zero1", "zero2", "zero3")

    @classmethod
    def read(cls, path: str | Path) -> "Layout":
        """
        Read the layout from an accelerate YAML.

        Raises:
            ValueError: accelerate does not know a key, or trl_ext does not support the file's mode.
        """
        config = load_config_from_file(str(path))
        kind = str(getattr(config.distributed_type, "value", config.distributed_type))
        count: dict[str, Any] = {"processes": max(config.num_processes, 1), "machines": max(config.num_machines, 1)}
        if kind == "NO":
            return cls()
        if kind.startswith("MULTI_"):
            return cls("ddp" if count["processes"] > 1 else "single", **count)
        if kind == "FSDP" and int(config.fsdp_config.get("fsdp_version", 1)) == 2:
            offload = bool(config.fsdp_config.get("fsdp_offload_params"))
            checkpoints = bool(config.fsdp_config.get("fsdp_activation_checkpointing"))
            count |= {"offloads_weights": offload, "offloads_optimizer": offload}
            return cls("fsdp2", **count, checkpoints_activations=checkpoints)
        if kind == "DEEPSPEED":
            return cls._read_deepspeed(config.deepspeed_config, Path(path), count)
        raise ValueError(
            f"{path} has distributed_type {kind}: use NO, MULTI_GPU, DEEPSPEED, or FSDP with fsdp_version 2 (under "
            "FSDP1, PEFT saves no adapters)"
        )

    @classmethod
    def _read_deepspeed(cls, settings: dict, path: Path, count: dict[str, Any]) -> "Layout":
        parts = ("param", "optimizer")
        zero: dict[str, Any] = {
            f"offload_{part}": {"device": settings.get(f"offload_{part}_device")} for part in parts
        }
        zero["stage"] = settings.get("zero_stage", 2)
        if file := settings.get("deepspeed_config_file"):
            places = (Path(file), path.parent / file, path.parent.parent / file)
            place = next((place for place in places if place.is_file()), places[0])
            settings = json.loads(place.read_text())
            zero = settings.get("zero_optimization", {"stage": 0})
        offloads = [zero.get(f"offload_{part}", {}).get("device") in ("cpu", "nvme") for part in parts]
        live = zero.get("stage3_max_live_parameters", "auto")
        accumulation = settings.get("gradient_accumulation_steps")
        return cls(
            f"zero{zero['stage']}",
            **count,
            offloads_weights=offloads[0],
            offloads_optimizer=offloads[1],
            live_parameters=10**9 if live == "auto" else int(live),
            accumulation=accumulation if isinstance(accumulation, int) else None,
        )


@dataclass(frozen=True)
class LoadedReward:
    """
    Describe a model that a reward function, such as a `ModelReward`, loads itself. Each process holds all of it.

    Args:
        config: configuration of the classifier.
        dtype: dtype of its weights.
        bits: 8 if its weights are quantised to 8 bits, else None.
        max_batch_tokens, batch_size: largest number of tokens, and of rows, in one forward pass; None sets no limit.
        members: number of adapters on this base, if an ensemble shares it. The adapters' bytes are not counted, since
            their rank is not known.
    """

    config: Any
    dtype: torch.dtype = torch.float32
    bits: int | None = None
    max_batch_tokens: int | None = 16384
    batch_size: int | None = None
    members: int = 1

    def rows(self, most: int, length: int) -> int:
        """Return the number of rows, out of `most` rows of `length` tokens, that one forward pass reads."""
        return max(1, min(most, self.batch_size or most, (self.max_batch_tokens or most * length) // length))


@dataclass
class Job:
    """
    Describe a run to plan.

    Args:
        stage: the training stage, such as `ppo`.
        args: its training arguments, such as a `PPOConfig`.
        layout: how the run is spread over processes.
        policy: configuration of the trained model, which is a classifier in the stages `reward` and `pretrain_critic`.
        rewards: configurations of PPO's reward models that have a separate base.
        dtype: dtype of the weights as loaded.
        peft_config: configuration of the adapter, if there is one.
        bits, nested: bits of a quantised base (None: it is not quantised), and whether its scales are quantised, too.
        prompt_length: tokens of PPO's longest prompt; in the stage `pretrain_critic`, of the longest prompt with its
            answer.
        value_model: configuration of PPO's critic if a path names the critic; None takes the policy's configuration.
        ref_model: whether a reference model is given. It is then kept in memory, even if an adapter is trained.
        shared_rewards: number of reward models that are adapters on the policy's base.
        loaded_rewards: the models that reward functions load, see [`LoadedReward`].
        turns: how often PPO's policy generates in an episode, at most; above 1 with tools.
        ref_adapter: whether training continues an existing adapter. The reference is then a copy of this adapter.
        only_environment: whether an environment gives all rewards, so that no reward model can be fooled.
    """

    stage: Stage
    args: Any
    policy: Any
    layout: Layout = field(default_factory=Layout)
    rewards: tuple[Any, ...] = ()
    dtype: torch.dtype = torch.float32
    peft_config: Any = None
    bits: int | None = None
    nested: bool = False
    prompt_length: int = 512
    value_model: Any = None
    ref_model: bool = False
    shared_rewards: int = 0
    loaded_rewards: tuple[LoadedReward, ...] = ()
    turns: int = 1
    ref_adapter: bool = False
    only_environment: bool = False

    @property
    def mixed(self) -> torch.dtype | None:
        """Return the dtype of mixed precision; None without it."""
        return torch.bfloat16 if self.args.bf16 else torch.float16 if self.args.fp16 else None

    @property
    def length(self) -> int:
        """Return the maximum number of tokens of a text, in a stage without rollouts."""
        if self.stage == "pretrain_critic":  # nothing is truncated
            return self.prompt_length
        return self.args.max_length or context_of(self.policy, 1024)

    @property
    def longest_history(self) -> int:
        """Return the maximum number of tokens before a turn of PPO's policy."""
        return self.prompt_length + (self.args.max_completion_length if self.turns > 1 else 0)

    @property
    def compute_dtype(self) -> torch.dtype:
        """Return the dtype of the weights in a pass: `mixed` if DeepSpeed or FSDP2 casts them, else `dtype`."""
        return self.mixed if self.layout.casts_weights and self.mixed is not None else self.dtype

    @property
    def autocast(self) -> torch.dtype | None:
        """Return the dtype of autocast; None without mixed precision, or if DeepSpeed or FSDP2 casts the weights."""
        return None if self.layout.casts_weights else self.mixed


@dataclass
class Role:
    """
    Hold what one model keeps on one GPU.

    Args:
        name: name of the role, such as `policy`.
        parameters, trained: number of all weights, and of the trained ones.
        weights, gradients, optimizer: bytes of the weights, of the gradients and of the optimizer's state.
        note: text to show beside the role.
        config: the model's configuration. None is that of the job's policy; for a reward model in PPO, that of the
            first of `job.rewards`, if there is one.
        on_base: whether the model runs on the policy's base.
    """

    name: str
    parameters: int = 0
    trained: int = 0
    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    note: str = ""
    config: Any = None
    on_base: bool = False


@dataclass
class Plan:
    """
    Hold the memory that a run needs on each GPU, and its schedule.

    Args:
        roles: the models of the run.
        phases: for each phase, such as `update`, the bytes that it needs besides weights and optimizer state, by
            purpose.
        schedule: batch sizes and numbers of steps, by name.
        checkpoint: bytes on disk of one checkpoint.
        host: bytes that a process keeps in the machine's memory: what is offloaded, and the copy of a checkpoint that
            is saved in the background.
        beside: bytes of vLLM, by purpose; empty if the trainer generates itself.
    """

    roles: list[Role]
    phases: dict[str, dict[str, int]]
    schedule: dict[str, int]
    checkpoint: int
    host: int = 0
    beside: dict[str, int] = field(default_factory=dict)

    @property
    def resident(self) -> int:
        """Return the bytes that are in use in every phase: those of weights and optimizer states."""
        return sum(role.weights + role.optimizer for role in self.roles)

    @property
    def peak(self) -> int:
        """Return the bytes that are in use in the phase that needs most."""
        return self.resident + sum(self.phases[self.peak_phase].values())

    @property
    def peak_phase(self) -> str:
        """Return the name of the phase that needs most memory."""
        return max(self.phases, key=lambda name: sum(self.phases[name].values()))


def known_not_to_work(job: Job) -> list[str]:
    """
    Return a sentence for each reason why a run (`job`) cannot work.

    Settings for which the run's configuration class raises an error are not checked here.
    """
    args = job.args
    layout = job.layout
    peft = job.peft_config is not None
    accumulated = args.gradient_accumulation_steps
    reasons = [
        (
            bool(job.bits) and not peft and job.stage != "pretrain_critic",
            f"a base in {job.bits} bits cannot be trained: set `use_peft: true`, or do not quantise it",
        ),
        (
            bool(job.bits) and job.stage == "pretrain_critic",
            f"a critic cannot be pretrained on a base in {job.bits} bits: do not quantise it",
        ),
        (
            job.dtype == torch.float16 and not peft,
            "weights in float16 cannot be trained, since their gradients underflow: set `dtype: float32`",
        ),
        (
            layout.accumulation not in (None, accumulated),
            f"DeepSpeed's settings fix gradient_accumulation_steps to {layout.accumulation}, the recipe to "
            f"{accumulated}: write `auto` in accelerate's file, or in the DeepSpeed file that it names",
        ),
    ]
    if job.stage != "ppo":
        return [message for holds, message in reasons if holds]
    reasons += [
        (
            peft and layout.checkpoints_activations,
            "FSDP's own activation checkpointing recomputes layers with the adapter that is active then, which gives "
            "wrong gradients: set `fsdp_activation_checkpointing: false` in accelerate's file, and "
            "`activation_checkpointing: true` in the recipe",
        ),
        (
            layout.is_deepspeed and args.critic_warmup_rollouts > 0,
            "`critic_warmup_rollouts` skips updates of the policy, but DeepSpeed's engine steps inside `backward`: "
            "use DDP or FSDP2, or leave `critic_warmup_rollouts` out",
        ),
    ]
    found = [message for holds, message in reasons if holds]
    try:
        prepare_adapters("", None if job.value_model is None else "", job.peft_config, None)
    except ValueError as error:
        found.append(str(error))
    return found


def known_to_go_wrong(job: Job, pairs: int | None = None, shared_prompts: str | None = None) -> list[str]:
    """
    Return a sentence for each choice of settings or data that is likely to make a run end badly.

    Args:
        job: the run.
        pairs: number of preference pairs that the run trains on, if known.
        shared_prompts: a sentence on the prompts that SFT and PPO share, if they share any.
    """
    args = job.args
    if job.stage != "ppo":
        few = f"{pairs} preference pairs: with fewer than 10,000, a reward model or DPO mostly memorises the pairs"
        return [few] if job.stage in ("reward", "dpo") and pairs is not None and pairs < 10_000 else []
    warnings = [
        (
            args.kl_coef == 0 and not job.only_environment,
            "`kl_coef: 0`: without a KL penalty the policy learns to exploit the reward model's mistakes",
        ),
        (
            shared_prompts,
            f"{shared_prompts}: SFT has memorised their answers, so the policy has little left to explore there",
        ),
    ]
    return [message for holds, message in warnings if holds]


# ---- How long it takes ----


class GPU(NamedTuple):
    """
    Describe a GPU by its vendor's figures.

    Args:
        name: name of a common GPU of that size.
        memory: nominal memory in GB.
        tflops: 10¹² operations a second in bfloat16, without sparsity.
        bandwidth: 10¹² bytes a second.
    """

    name: str
    memory: int
    tflops: float
    bandwidth: float


GPUS = (
    GPU("RTX 3060", 12, 51, 0.36),
    GPU("RTX 4080", 16, 97, 0.72),
    GPU("RTX 4090", 24, 165, 1.01),
    GPU("A100", 40, 312, 1.56),
    GPU("L40S", 48, 362, 0.86),
    GPU("H100", 80, 989, 3.35),
    GPU("H200", 141, 989, 4.8),
    GPU("B200", 180, 2250, 8.0),
)


@dataclass(frozen=True)
class Efficiency:
    """
    Hold assumptions on the share of a GPU's nominal speed that a run reaches.

    Args:
        mfu: share of the GPU's operations a second that forward and backward passes reach.
        bandwidth: share of the GPU's bandwidth that the generation of tokens reaches.
        layer_ms: milliseconds that Python needs for one layer and one generated token, however many rows are generated
            at once. Without this time the estimate for small models would be far too short. vLLM needs a tenth of it.
        scaling: share of its speed that each GPU keeps if there are several.
    """

    mfu: float = 0.35
    bandwidth: float = 0.6
    layer_ms: float = 0.8
    scaling: float = 0.9


def seconds_per_example(
    job: Job, plan: Plan, gpu: GPU, efficiency: Efficiency, tokens: float | None = None
) -> dict[str, float]:
    """
    Return the seconds that one GPU spends on an example (a row, a pair, or an episode of PPO), by phase: `generate`,
    `score` and `update` for PPO, only `update` for other stages.

    A forward pass takes 2 operations for each weight and token, and for attention 2 · layers · width · length more for
    each token. A backward pass takes twice as many operations as a forward pass, or equally many if most weights are
    frozen. Activation checkpointing adds one forward pass.

    Args:
        job, plan: the run, and its plan.
        gpu, efficiency: the GPU's nominal speed, and how much of it the run reaches.
        tokens: number of tokens of one text; None takes the longest text allowed, which `generate` always takes.
    """
    args = job.args
    policy = plan.roles[0]
    is_ppo = job.stage == "ppo"
    length = tokens or (job.prompt_length + args.max_completion_length if is_ppo else job.length)
    rate = gpu.tflops * 1e12 * efficiency.mfu
    if job.mixed is None and job.dtype == torch.float32:
        rate /= 16  # without tensor cores

    def forward(role: Role) -> float:
        config = job.rewards[0] if role.name == "reward model" and is_ppo and job.rewards else job.policy
        weights = policy.parameters if role.on_base else role.parameters
        return _forward((role.config or config).get_text_config(), weights, length) / rate

    def update(role: Role) -> float:
        is_frozen = role.trained < policy.parameters / 2
        return forward(role) * ((2 if is_frozen else 3) + bool(args.activation_checkpointing))

    trained = [role for role in plan.roles if role.trained]
    if not is_ppo:
        texts = 2 if job.stage in ("dpo", "reward") else 1
        # DPO's reference is read once, also where that is precomputed
        return {"update": texts * (update(trained[0]) + (job.stage == "dpo") * forward(policy))}
    return {
        "generate": _generation(job, plan, gpu, efficiency, rate),
        "score": sum(map(forward, plan.roles)),
        "update": args.num_ppo_epochs * sum(map(update, trained)),
    }


def examples(job: Job, plan: Plan, rows: int | None) -> float | None:
    """
    Return the number of examples (PPO: episodes) of a whole run, by its job and plan.

    `rows` is the number of rows of the dataset. If it is None and the run's length depends on it, None is returned.
    """
    args = job.args
    is_ppo = job.stage == "ppo"
    if is_ppo and args.total_episodes:
        return args.total_episodes
    if args.max_steps > 0 and is_ppo:
        return args.max_steps / plan.schedule["optimizer steps per rollout"] * plan.schedule["episodes per rollout"]
    if args.max_steps > 0:
        return args.max_steps * plan.schedule["examples per optimizer step"]
    return rows and rows * args.num_train_epochs * (args.num_generations if is_ppo else 1)


def hours(job: Job, plan: Plan, gpu: GPU, efficiency: Efficiency, count: float, tokens: float | None = None) -> float:
    """
    Return the wall-clock hours that a run takes on the GPUs of its layout.

    With `rollouts_ahead`, PPO generates while it scores and updates, and only the longer of the two counts.

    Args:
        job, plan, gpu, efficiency: as for [`seconds_per_example`].
        count: number of examples of the whole run.
        tokens: as for [`seconds_per_example`].
    """
    phases = seconds_per_example(job, plan, gpu, efficiency, tokens)
    processes = job.layout.processes
    seconds = sum(phases.values())
    if job.stage == "ppo" and job.args.rollouts_ahead:  # generation and the rest overlap: only the longer one counts
        seconds = max(phases["generate"], phases["score"] + phases["update"])
    return count * seconds / (processes * (efficiency.scaling if processes > 1 else 1)) / 3600


def _forward(config: Any, weights: int, length: float) -> float:
    lookups = 0 if getattr(config, "tie_word_embeddings", False) else config.vocab_size * config.hidden_size
    attention = 2 * config.num_hidden_layers * config.hidden_size * length
    return length * (2 * max(weights - lookups, 0) + attention)


def _generation(job: Job, plan: Plan, gpu: GPU, efficiency: Efficiency, rate: float) -> float:
    config = job.policy.get_text_config()
    args = job.args
    weights = plan.roles[0].parameters
    rows = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.num_mini_batches
    rows = rows if args.use_vllm else min(args.local_rollout_forward_batch_size, rows)
    width = job.compute_dtype.itemsize
    read = weights * (job.bits / 8 if job.bits else width)
    read += kv_cache_bytes(config, rows, int(job.prompt_length + args.max_completion_length / 2), width)
    step = read / (gpu.bandwidth * 1e12 * efficiency.bandwidth)
    step += config.num_hidden_layers * efficiency.layer_ms / 1000 * (0.1 if args.use_vllm else 1)
    # As if each turn read its history anew: the prompt, and the share of the answer that the turns before it made
    turns = [job.prompt_length + args.max_completion_length * turn / job.turns for turn in range(job.turns)]
    prefill = sum(_forward(config, weights, length) for length in turns)
    return args.max_completion_length * step / rows + prefill / rate
