"""Compute the memory per GPU and role, time, batches and disk of a run before it starts, and what will not work.

    trl-ext plan --config qwen2.5-0.5b/ppo --accelerate_config single_gpu

Further flags override the recipe's file, as in the recipe itself. No weights are loaded or allocated: the forward and
backward passes run on tensors without data. A model that another recipe of the same folder will make (`outputs/…`) is
traced back to its model on the hub. The command then prints on which GPUs the run fits, with one and with eight of
them, and about how long it takes there. If the run does not fit into `--gpu_memory`, or on any GPU of the list, the
usual remedies are tried, and the command that fits is printed. The peak does not include the CUDA context (some 0.5
GiB) and memory that the allocator cannot use. The exit status is 1 if the run does not fit into `--gpu_memory`, and 2
if it cannot work.
"""

if __name__ == "__main__":  # before the libraries that are imported next
    from trl_ext.upstream import quiet

    quiet()

import argparse
import contextlib
import copy
import json
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml
from peft import LoraConfig, PeftConfig
from transformers import AutoConfig, AutoTokenizer
from trl import get_peft_config

from trl_ext import DPOConfig, PPOConfig, StrictTrlParser, load_dataset_split
from trl_ext.cli.arguments import ClassifierArguments, ModelArguments
from trl_ext.cli.parser import read_yaml
from trl_ext.dpo import RewardConfig, SFTConfig
from trl_ext.ppo import CriticConfig
from trl_ext.runs import accelerate_file, config_file, find
from trl_ext.workbench.planning import (
    GIB,
    GPUS,
    Efficiency,
    Job,
    Layout,
    LoadedReward,
    Plan,
    examples,
    hours,
    known_not_to_work,
    known_to_go_wrong,
    plan,
)

from . import dpo, ppo, pretrain_critic, reward, sft

ARGUMENTS: dict[str, tuple[type, type, type]] = {
    "sft": (sft.SFTScriptArguments, SFTConfig, ModelArguments),
    "reward": (reward.RewardScriptArguments, RewardConfig, ClassifierArguments),
    "pretrain_critic": (pretrain_critic.CriticScriptArguments, CriticConfig, ClassifierArguments),
    "ppo": (ppo.PPOScriptArguments, PPOConfig, ModelArguments),
    "dpo": (dpo.DPOScriptArguments, DPOConfig, ModelArguments),
}
TURNS = 8  # of an episode with tools, where the recipe sets no limit
IDS = ("prompt_ids", "completion_ids")
PROG = "trl-ext plan"


def parse(arguments: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(PROG, description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--config", required=True, help="A recipe's YAML: a file, or the name of one that ships.")
    parser.add_argument(
        *("--accelerate_config", "--accelerate"),
        help="accelerate's YAML: a file, or the name of one that ships; if unset, one process on one GPU.",
    )
    parser.add_argument(
        "--stage", choices=tuple(ARGUMENTS), help="Training stage, if the file's name does not begin with it."
    )
    parser.add_argument(
        "--prompt_length",
        type=int,
        help="Tokens of a prompt (in pretrain_critic, with its answer). Unset: measured, or the recipe's, or 512.",
    )
    parser.add_argument("--gpu_memory", type=float, help="Memory of one GPU in GiB, to check whether the run fits.")
    parser.add_argument(
        "--mfu",
        type=float,
        default=0.35,
        help="Share of a GPU's peak operations per second that forward and backward passes are assumed to reach.",
    )
    return parser.parse_known_args(arguments)


def origin(name: str, folder: Path) -> tuple[str, dict | None]:
    """Return the hub name or folder that a model comes from, and the recipe in `folder` that makes it, if any."""
    makers = {}
    for path in sorted(folder.glob("*.yaml")):  # others' files may lie there, too
        with contextlib.suppress(yaml.YAMLError):
            recipe = read_yaml(path.read_text())
            if isinstance(recipe, dict) and recipe.get("model_name_or_path"):
                makers[recipe.get("output_dir")] = recipe
    first = None
    # Each recipe once: one may start from its own output
    while not Path(name).exists() and (maker := makers.pop(name.removesuffix("/merged"), None)):
        first = first or maker
        name = maker["model_name_or_path"]
    return name, first


def loaded_rewards(entries: Any, folder: Path, load_config: Callable[[str], Any]) -> Iterator[LoadedReward]:
    """Yield the reward models that the entries of `rewards:` load, including nested entries."""
    for entry in entries if isinstance(entries, list) else [entries]:
        for name, given in entry.items() if isinstance(entry, dict) else ():
            if name == "ModelReward":
                yield loaded_reward(given["model"], given, 1, folder, load_config)
            elif name == "EnsembleReward":
                members = given["members"]
                kwargs = given.get("model_kwargs") or {}
                named = members_of(members, folder) if isinstance(members, str) else members
                models = [member for member in named if isinstance(member, str) and ".py:" not in member]
                bases = Counter((base_of(model, folder), is_adapter_of(model, folder)) for model in models)
                for (base, is_shared), count in bases.items():  # adapters on one base share it
                    each = loaded_reward(base, kwargs, count if is_shared else 1, folder, load_config)
                    yield from [each] * (1 if is_shared else count)
                yield from loaded_rewards(members, folder, load_config)
            else:
                yield from loaded_rewards(given, folder, load_config)


def members_of(ensemble: str, folder: Path) -> list[str]:
    """
    Return the members of an ensemble that `trl-ext reward` has written, or that a recipe in `folder` will write; raise
    a `ValueError` if there is neither.
    """
    file = Path(ensemble, "ensemble.json")
    maker = origin(ensemble, folder)[1]
    if file.is_file():
        return [str(Path(ensemble, each["folder"])) for each in json.loads(file.read_text())["members"]]
    if not (maker and maker.get("ensemble")):
        raise ValueError(
            f"{ensemble} holds no ensemble.json, and no recipe in {folder} makes an ensemble there: name the "
            "folder of an ensemble"
        )
    return [ensemble] * maker["ensemble"]


def is_adapter_of(name: str, folder: Path) -> bool:
    """Return whether a reward model is an adapter, or will be one after the recipe that makes it has run."""
    maker = origin(name, folder)[1]
    return bool(maker and maker.get("use_peft")) or Path(name, "adapter_config.json").exists()


def base_of(name: str, folder: Path) -> str:
    """Return the name of the model whose configuration to read; for an adapter this is its base."""
    name, _ = origin(name, folder)
    file = Path(name, "adapter_config.json")
    return json.loads(file.read_text())["base_model_name_or_path"] if file.is_file() else name


def loaded_reward(
    name: str, kwargs: dict, members: int, folder: Path, load_config: Callable[[str], Any]
) -> LoadedReward:
    """
    Describe the reward model `name`, which `members` adapters share as their base (1 for a model alone), by its
    configuration and by `kwargs`, the arguments of `ModelReward`.
    """
    config = load_config(base_of(name, folder))
    dtype = kwargs.get("dtype") or getattr(config, "dtype", None) or torch.float32
    return LoadedReward(
        config,
        getattr(torch, dtype) if isinstance(dtype, str) else dtype,
        8 if kwargs.get("load_in_8bit") else None,
        kwargs.get("max_batch_tokens", LoadedReward.max_batch_tokens),
        kwargs.get("batch_size"),
        members,
    )


def make_job(
    stage: str, script_args: Any, args: Any, model_args: Any, folder: Path, layout: Layout, prompt_length: int,
    load_config: Callable[[str], Any], turns: int = 1,
) -> Job:  # fmt: skip
    """Make a [`Job`] from a recipe's parsed arguments; `load_config` returns a model's configuration by its name."""
    policy = load_config(base_of(model_args.model_name_or_path, folder))
    peft_config = get_peft_config(model_args)
    if has_adapter := Path(model_args.model_name_or_path, "adapter_config.json").is_file():  # it is trained on
        peft_config = PeftConfig.from_pretrained(model_args.model_name_or_path)
        peft_config.inference_mode = False
    dtype = getattr(policy, "dtype", None) if model_args.dtype == "auto" else getattr(torch, model_args.dtype)
    rewards = []
    shared = 0
    entries = getattr(script_args, "rewards", None)
    value_model = scorer = None
    if stage == "ppo":
        scorer = script_args.reward_model_name_or_path
        if scorer:
            maker = origin(scorer, folder)[1]
            shares = is_adapter_of(scorer, folder) and peft_config is not None and args.share_reward_base
            shares = shares and (maker is None or maker["model_name_or_path"] == model_args.model_name_or_path)
            rewards, shared = ([], 1) if shares else ([load_config(base_of(scorer, folder))], 0)
        if script_args.value_model_name_or_path:
            on_policys_base = peft_config is not None and is_adapter_of(script_args.value_model_name_or_path, folder)
            value_model = (
                None if on_policys_base else load_config(base_of(script_args.value_model_name_or_path, folder))
            )
    return Job(
        stage,
        args,
        policy,
        layout,
        tuple(rewards),
        dtype=dtype or torch.float32,
        peft_config=peft_config,
        bits=4 if model_args.load_in_4bit else 8 if model_args.load_in_8bit else None,
        nested=model_args.use_bnb_nested_quant,
        prompt_length=prompt_length,
        turns=turns,
        value_model=value_model,
        ref_model=bool(getattr(script_args, "ref_model_name_or_path", None)),
        shared_rewards=shared,
        loaded_rewards=tuple(loaded_rewards(entries, folder, load_config)),
        ref_adapter=has_adapter,
        only_environment=bool(getattr(script_args, "environment", None)) and not (entries or scorer),
    )


def local_split(name: str | None, split: str) -> Any:
    """Load a split; return None if the data is not on this machine, or if an environment provides the prompts."""
    return load_dataset_split(name, split, columns=()) if name and find(name).exists() else None


def measured_tokens(stage: str, dataset: Any, tokenizer: Any) -> tuple[int, float] | None:
    """
    Return the largest and the mean number of tokens in the first 2,000 rows: of prompts for PPO, else of texts (of a
    pair, its chosen one).

    Return None without rows, if the columns are not those of the stage, or without a tokenizer, unless the rows have
    token ids.
    """
    rows = dataset.select(range(min(len(dataset), 2000)))
    if stage == "pretrain_critic" and {*IDS} <= {*rows.column_names}:
        return longest_and_mean([sum(map(len, ids)) for ids in zip(*(rows[name] for name in IDS), strict=True)])

    def text(value: Any) -> str:
        return value if isinstance(value, str) else " ".join(str(message["content"]) for message in value)

    columns = {"ppo": [["prompt"]], "pretrain_critic": [["prompt", "completion"]]}
    columns |= {"sft": [["prompt", "completion"], ["messages"], ["text"]]}
    pairs = [["prompt", "chosen"], ["chosen"]]
    found = next((names for names in columns.get(stage, pairs) if {*names} <= {*dataset.column_names}), None)
    if found is None or tokenizer is None:
        return None
    texts = ["".join(text(row[name]) for name in found) for row in rows]
    return longest_and_mean([len(ids) for ids in tokenizer(texts)["input_ids"]] if texts else [])


def longest_and_mean(lengths: list[int]) -> tuple[int, float] | None:
    return (max(lengths), sum(lengths) / len(lengths)) if lengths else None


def shared_prompts(mine: Any, model: str, folder: Path) -> str | None:
    """
    Return a sentence on prompts that PPO's data shares with the data of the SFT before it; None if there are none, or
    if the data are not on this machine.
    """
    maker = origin(model, folder)[1]
    theirs = maker and local_split(maker["dataset_name"], maker.get("dataset_train_split", "train"))
    if not (mine and theirs and "prompt" in theirs.column_names):
        return None
    common = {str(prompt) for prompt in mine["prompt"]} & {str(prompt) for prompt in theirs["prompt"]}
    return f"{len(common)} of PPO's {len(mine)} prompts are SFT's, too" if common else None


def vllm_share(job: Job) -> float:
    """Return the share of each GPU's memory that vLLM takes beside the run."""
    colocated = job.stage == "ppo" and job.args.use_vllm and job.args.vllm_mode == "colocate"
    return job.args.vllm_gpu_memory_utilization if colocated else 0.0


def fits(result: Plan, job: Job, gpu_memory: float) -> bool:
    return result.peak / GIB + vllm_share(job) * gpu_memory <= gpu_memory


def report(result: Plan, job: Job, gpu_memory: float | None) -> str:
    """Return the plan as text: memory in GiB per GPU, batches, disk."""
    layout = job.layout
    lines = [f"{layout.mode}, {layout.processes} process(es) on {layout.machines} machine(s)", ""]
    lines.append(
        f"{'GiB per GPU':<16}{'parameters':>12}{'trained':>12}{'weights':>10}{'gradients':>10}{'optimizer':>10}"
    )
    for role in result.roles:
        count = f"{role.parameters / 1e6:,.1f} M" if role.parameters else "-"
        trained = f"{role.trained / 1e6:,.1f} M" if role.trained else "-"
        sizes = "".join(f"{size / GIB:10.2f}" for size in (role.weights, role.gradients, role.optimizer))
        lines.append(f"{role.name:<16}{count:>12}{trained:>12}{sizes}  {role.note}".rstrip())
    lines += ["", f"constant: {result.resident / GIB:.2f}, and in addition while it"]
    for name, parts in result.phases.items():
        shown = ", ".join(f"{part} {size / GIB:.2f}" for part, size in parts.items() if size) or "nothing"
        lines.append(f"  {name + 's':<10}{sum(parts.values()) / GIB:6.2f}: {shown}")
    lines += ["", f"peak: {result.peak / GIB:.1f} GiB per GPU, in `{result.peak_phase}`"]
    share = vllm_share(job)
    if result.beside:
        needs = ", ".join(f"{part} {size / GIB:.2f}" for part, size in result.beside.items())
        where = f"vLLM beside it, {share:.0%} of each GPU's memory:" if share else "vLLM's server, on GPUs of its own:"
        lines.append(f"  and {where} {needs}")
    if gpu_memory:
        lines.append(f"  {'fits' if fits(result, job, gpu_memory) else 'DOES NOT FIT'} in {gpu_memory:g} GiB")
    if result.host:
        lines.append(f"machine's memory: {result.host / GIB:.1f} GiB per process at most")
    lines += ["", *(f"{name}: {value:,}" for name, value in result.schedule.items())]
    lines.append(
        f"disk per checkpoint: {result.checkpoint / GIB:.1f} GiB, and {job.args.save_total_limit or 'all'} kept"
    )
    return "\n".join(lines)


def title(job: Job) -> str:
    layout = job.layout
    return "1 GPU" if layout.processes == 1 else f"{layout.processes} GPUs, {layout.mode}"


def with_progress(job: Job, what: str = "") -> Plan:
    """Print that planning begins, since it takes a minute for a large model; return the plan."""
    print(f"planning for {title(job)}{what} …", file=sys.stderr, flush=True)
    return plan(job)


# ---- Where it does not fit ----


def ways(job: Job) -> Iterator[tuple[str, Job]]:
    """Yield the usual ways to save memory, the cheapest first: flags, and the job with these flags."""
    args = job.args
    layout = job.layout
    is_ppo = job.stage == "ppo"

    def way(**settings: Any) -> tuple[str, Job]:
        changed = copy.copy(args)
        vars(changed).update(settings)
        flags = " ".join(f"--{name} {str(value).lower()}" for name, value in settings.items())
        return flags, replace(job, args=changed)

    if is_ppo and layout.shards_weights and args.ds3_gather_for_generation and not args.use_vllm:
        yield way(ds3_gather_for_generation=False)
    if not (args.activation_checkpointing or layout.checkpoints_activations):
        yield way(activation_checkpointing=True, gradient_checkpointing=True)
    if (size := args.per_device_train_batch_size) > 1:
        steps = size * args.gradient_accumulation_steps
        yield way(per_device_train_batch_size=1, gradient_accumulation_steps=steps)
    if is_ppo and (size := args.local_rollout_forward_batch_size) > 1:
        yield way(local_rollout_forward_batch_size=max(1, size // 8))
    if layout.mode in ("ddp", "fsdp2", "zero2") and not job.bits and layout.machines == 1:  # zero3.yaml is for one
        yield "--accelerate_config zero3", replace(job, layout=replace(layout, mode="zero3"))
    if job.peft_config is None:
        kind = "SEQ_CLS" if job.stage in ("reward", "pretrain_critic") else "CAUSAL_LM"
        adapter = LoraConfig(r=16, target_modules="all-linear", task_type=kind)
        yield "--use_peft true --lora_target_modules all-linear", replace(job, peft_config=adapter)


def made_to_fit(job: Job, result: Plan, gpu_memory: float, given: list[str]) -> str:
    """
    Try the usual ways to save memory, one after the other, until the run fits; return a text on those that help.

    Args:
        job, result: the run, and its plan.
        gpu_memory: GiB of one GPU.
        given: the flags that the run has so far.
    """
    lines = ["", f"what helps against {gpu_memory:g} GiB, one after the other:"]
    flags = []
    tried: set[str] = set()
    while not fits(result, job, gpu_memory):
        # Anew after each that helps: where weights are spread otherwise, gathering less is tried again
        found = next(((flag, changed) for flag, changed in ways(job) if flag not in tried), None)
        if found is None:
            break
        tried.add(found[0])
        if known_not_to_work(found[1]):
            continue
        try:
            less = with_progress(found[1], f" with {found[0]}")
        except ValueError:  # the settings do not go together
            continue
        if less.peak < 0.97 * result.peak:
            lines.append(f"  {found[0]:<62}{result.peak / GIB:7.1f} → {less.peak / GIB:.1f} GiB")
            flag, job = found
            result = less
            flags += flag.split()
    if not flags:
        lines = ["", "none of the usual ways helps"]
    if "zero3" in flags and job.layout.processes != 8:
        flags += ["--num_processes", str(job.layout.processes)]
    if fits(result, job, gpu_memory):
        command = ["trl-ext", job.stage.replace("_", "-"), *without(given, flags), *flags]
        return "\n".join([*lines, "then it fits:", f"  {shlex.join(command)}"])
    more = "more GPUs" if job.layout.shards_weights else "GPUs that share the weights (`--accelerate_config zero3`)"
    lines.append(f"it does not fit so: use {more}, a smaller model, or a base in 4 bits (`--load_in_4bit`)")
    return "\n".join(lines)


def without(flags: list[str], others: list[str]) -> list[str]:
    """Return a command line's flags without those, and their values, that `others` lists."""
    kept = []
    keeps = True
    for word in flags:
        keeps = word.split("=")[0] not in others if word.startswith("--") else keeps
        kept += [word] * keeps
    return kept


def time_of(number: float) -> str:
    """Return a number of hours as text, in min, h or days."""
    unit, size = ("min", 1 / 60) if number < 1 else ("h", 1) if number < 48 else ("days", 24)
    return f"{number / size:.{0 if number / size >= 10 else 1}f} {unit}"


def verdicts(
    runs: list[tuple[Job, Plan]], efficiency: Efficiency, rows: int | None, tokens: float | None
) -> list[str]:
    """
    Return a table's lines: whether the run fits each GPU (row), in each number (column), and how long it takes.

    `rows` is the number of the dataset's rows, and `tokens` the mean number of tokens of a text; None if not known.
    """
    counts = [examples(job, result, rows) for job, result in runs]
    unit = "" if counts[0] else " per 10,000 examples"
    lines = ["", f"{'fits, and takes about' + unit:<44}".rstrip(), f"{'':18}"]
    for job, result in runs:
        lines[-1] += f"{title(job)}, {result.peak / GIB:.1f} GiB each".ljust(30)
    lines[-1] = lines[-1].rstrip()
    for gpu in GPUS:
        line = f"  {gpu.memory:>3} GB {gpu.name:<9}"
        for (job, result), count in zip(runs, counts, strict=True):
            needed = result.peak / GIB + 0.5 + vllm_share(job) * gpu.memory
            if needed > gpu.memory:
                verdict = "no"
            else:
                took = time_of(hours(job, result, gpu, efficiency, count or 10_000, tokens))
                verdict = f"{'yes' if needed <= 0.9 * gpu.memory else 'just'}, {took}"
            line += f"  {verdict:<28}"
        lines.append(line.rstrip())
    lines += [
        "  (`just`: less than a tenth of the memory is to spare. Times are computed from the vendors' peak rates, not",
        f"  measured: {efficiency.mfu:.0%} of the operations in passes (`--mfu`), generation to full length; without",
        "  evaluation and loading.)",
    ]
    return lines


def as_on_gpu(stage: str, file: Path, flags: list[str]) -> list[str]:
    """
    Return flags for the defaults that a machine with a GPU would have, such as `bf16`, to set on one without a GPU.
    """
    by_flag = {flag.lstrip("-"): value != "false" for flag, value in zip(flags, [*flags[1:], ""], strict=False)}
    given = {**(read_yaml(file.read_text()) or {}), **by_flag}
    more = ["--use_cpu", "true"]  # else a configuration for a GPU is refused here
    if given.get("use_cpu"):
        return more
    if not {"bf16", "fp16"} & {*given}:
        more += ["--bf16", "true"]
    if stage in ("sft", "reward") and not {"activation_checkpointing", "gradient_checkpointing"} & {*given}:
        more += ["--activation_checkpointing", "true"]
    return more


def stage_of(file: Path) -> str:
    """Return the training stage that the name of a recipe's file begins with; raise a `ValueError` without one."""
    if by_name := next((stage for stage in ARGUMENTS if file.name.startswith(stage)), None):
        return by_name
    raise ValueError(f"{file}: the file's name does not begin with a stage ({', '.join(ARGUMENTS)}): give `--stage`")


def main(arguments: list[str] | None = None, load_config: Callable[[str], Any] | None = None) -> None:
    # 1. Set-up: the recipe's own parser, and so its own checks
    if not (sys.argv[1:] if arguments is None else arguments):
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    options, flags = parse(arguments)
    parser = StrictTrlParser((), prog=PROG)
    with parser.one_line_errors():
        file = config_file("--config", options.config)
        stage = options.stage or stage_of(file)
        name = options.accelerate_config
        layout = Layout.read(accelerate_file("--accelerate_config", name)) if name else Layout()
        on_gpu = [] if torch.cuda.is_available() else as_on_gpu(stage, file, flags)
    script_arguments, config, model_arguments = ARGUMENTS[stage]
    planned = type(config.__name__, (config,), {"world_size": layout.processes})  # as where it will run
    parser = StrictTrlParser((script_arguments, planned, model_arguments), prog=PROG)
    script_args, args, model_args = parser.parse_args_and_config(["--config", str(file), *on_gpu, *flags])
    folder = file.parent

    def load(name: str) -> Any:
        return (load_config or AutoConfig.from_pretrained)(name)

    # 2. Data and job
    with parser.one_line_errors():
        data = local_split(script_args.dataset_name, script_args.dataset_train_split)
        tokens = tokenizer = None
        name = base_of(model_args.model_name_or_path, folder)
        if data is not None:
            with contextlib.suppress(OSError, ValueError):  # there is a configuration, but no tokenizer
                tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=True)
        if data is not None:
            tokens = measured_tokens(stage, data, tokenizer)
        limit = getattr(script_args, "max_prompt_length", None)
        longest = options.prompt_length or min(*(tokens or (limit or 512,))[:1], limit or 10**9)
        turns = 1
        has_environment = bool(getattr(script_args, "environment", None))
        if has_environment or getattr(script_args, "tools", None):
            calls = args.max_tool_calling_iterations
            turns = TURNS if calls is None else calls + 1
        job = make_job(stage, script_args, args, model_args, folder, layout, longest, load, turns)
    if reasons := known_not_to_work(job):
        parser.error("this cannot work: " + "; ".join(reasons))

    # 3. Plan and warn
    with parser.one_line_errors(ValueError):
        result = with_progress(job)
    print(report(result, job, options.gpu_memory))
    if tokens:
        what = "prompts" if stage == "ppo" else "texts"
        print(f"{what} have up to {tokens[0]} tokens, {tokens[1]:.0f} on average, in {script_args.dataset_name}")
    elif stage in ("ppo", "pretrain_critic") and not options.prompt_length:
        whose = "prompts" if stage == "ppo" else "prompts with their answers"
        print(f"assumed, not measured: the {whose} have {longest} tokens (`--prompt_length`)")
    if turns > 1:
        if args.max_tool_calling_iterations is None:
            print(f"assumed: episodes have {turns} turns (`--max_tool_calling_iterations {turns - 1}`)")
        says = "what `reset` says, " if has_environment else ""
        print(f"not counted: {says}the tools' descriptions in the prompt (`--prompt_length`), and the tools' own time")
    runs = [(job, result)]
    # Quantised weights are not sharded
    for other in (Layout(), Layout("ddp" if job.bits else "fsdp2", processes=8)):
        spread = replace(job, layout=other)
        if other.processes != layout.processes and not known_not_to_work(spread):
            runs.append((spread, with_progress(spread)))
    runs.sort(key=lambda run: run[0].layout.processes)
    length = tokens and tokens[1] + (args.max_completion_length if stage == "ppo" else 0)
    efficiency = Efficiency(options.mfu)
    print("\n".join(verdicts(runs, efficiency, data and len(data), length)))
    pairs = len(data) if data is not None and stage in ("reward", "dpo") else None
    shared = shared_prompts(data, model_args.model_name_or_path, folder) if stage == "ppo" else None
    for warning in known_to_go_wrong(job, pairs, shared):
        print(f"WARNING: {warning}")
    memory = options.gpu_memory or max(gpu.memory for gpu in GPUS) - 0.5
    if not fits(result, job, memory):
        spread = ["--accelerate_config", options.accelerate_config] if options.accelerate_config else []
        print(made_to_fit(job, result, memory, ["--config", options.config, *spread, *flags]))
        sys.exit(1 if options.gpu_memory else 0)


if __name__ == "__main__":
    main()
