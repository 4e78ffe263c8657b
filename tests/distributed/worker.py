"""Run every workload on the processes that `accelerate launch` has started, and save the results."""

import importlib
import json
import os
import sys
import time
from pathlib import Path

import torch
from accelerate import state
from accelerate.utils import DistributedType

_init = state.AcceleratorState.__init__


def _fsdp_on_cpu(self, *args, **kwargs):
    """Undo that accelerate silently turns FSDP with `use_cpu` into DDP."""
    _init(self, *args, **kwargs)
    if os.environ.get("ACCELERATE_USE_FSDP") == "true" and self.distributed_type == DistributedType.MULTI_CPU:
        self.distributed_type = DistributedType.FSDP
        self.fsdp_plugin = kwargs.get("fsdp_plugin")
        state.PartialState._shared_state["distributed_type"] = DistributedType.FSDP


state.AcceleratorState.__init__ = _fsdp_on_cpu
if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
    # It compiles for minutes, and gloo does the same. (As an attribute, `deepspeed.comm.torch` is torch itself.)
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
torch.distributed.destroy_process_group = lambda group=None: None  # other workloads run after a recipe

from datasets import Dataset  # noqa: E402
from peft import LoraConfig, get_peft_model  # noqa: E402
from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from transformers import TrainerCallback  # noqa: E402
from trl import RewardConfig, RewardTrainer, SFTConfig, SFTTrainer  # noqa: E402

import recipes.dpo  # noqa: E402
import recipes.ppo  # noqa: E402
import recipes.reward  # noqa: E402
import recipes.sft  # noqa: E402
from tests.agents import byte_tokenizer, counts, played_by  # noqa: E402
from tests.launch import spare_time  # noqa: E402
from tests.ppo.agent_worker import TOGETHER, make as make_agent  # noqa: E402
from tests.ppo.worker import CORRECTED, EachStep, raised_by, reward_mistake, topic_reward, with_nan  # noqa: E402
from tests.tiny import (  # noqa: E402
    ON_CPU,
    WORDS,
    prompts,
    scripted,
    skewed,
    tiny_llama,
    tiny_ppo,
    tiny_reward_model,
    tiny_tokenizer,
)
from trl_ext import DPOConfig, DPOTrainer, save_base_fingerprint  # noqa: E402
from trl_ext.callbacks import CanaryCallback  # noqa: E402

# Two minibatches of two micro-batches: one process takes the steps of two if each minibatch has the same rows
PPO = {
    "num_mini_batches": 2,
    "num_ppo_epochs": 2,
    "max_steps": 8,
    "save_steps": 4,
    "kl_controller": "adaptive",
    "kl_horizon": 100,
    "kl_target": 0.5,
    "reward_normalization": "running",
    "whiten_rewards": True,
}
ONE_EPOCH = {"num_ppo_epochs": 1, "max_steps": 4, "save_steps": 2}  # long enough to show all but further epochs
ORDER = {1: [0, 1, 4, 5, 2, 3, 6, 7], 2: [0, 1, 2, 3]}  # the order of a rollout's rows, by the number of processes
# One step of SGD with a learning rate of 1 subtracts the gradient
GRADIENT = {"num_mini_batches": 1, "num_ppo_epochs": 1, "max_steps": 1, "save_strategy": "no"}
GRADIENT |= {"optim": "sgd", "learning_rate": 1.0, "lr_scheduler_type": "constant", "max_grad_norm": 1e9}
LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"]}


def write_inputs(folder):
    """Save policy, reward model and reward adapter on the policy's base: ZeRO-3 partitions models that it loads."""
    policy, tokenizer = tiny_llama(), tiny_tokenizer()
    for name in ("policy", "reward", "reward model"):
        tokenizer.save_pretrained(folder / name)
    policy.save_pretrained(folder / "policy")
    tiny_reward_model(policy).save_pretrained(folder / "reward model")
    byte_tokenizer().save_pretrained(folder / "agent")
    tiny_llama(len(byte_tokenizer()), max_position_embeddings=2048).save_pretrained(folder / "agent")
    reward = tiny_reward_model(policy)
    reward.model.load_state_dict(policy.model.state_dict())
    reward.config.name_or_path = reward.name_or_path = str(folder / "policy")
    torch.manual_seed(3)
    reward = get_peft_model(reward, LoraConfig(task_type="SEQ_CLS", init_lora_weights=False, **LORA))
    reward.save_pretrained(folder / "reward")
    save_base_fingerprint(reward, folder / "reward")
    for seed, split in enumerate(("train", "test")):  # a reward model is tested on pairs that it was not trained on
        pairs = make_pairs(seed)
        answers = [{"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in pairs]
        for name, rows in (("pairs", pairs), ("answers", answers)):
            (folder / name).mkdir(exist_ok=True)
            (folder / name / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_pairs(seed=0):
    generator = torch.Generator().manual_seed(seed)

    def sentence():
        return " " + " ".join(WORDS[i] for i in torch.randint(len(WORDS), (5,), generator=generator))

    return [{"prompt": row["prompt"], "chosen": sentence(), "rejected": sentence()} for row in prompts(8)]


def micro_batches(size, steps, parts):
    """The settings of an optimizer step with each micro-batch split into parts."""
    return {"per_device_train_batch_size": size // parts, "gradient_accumulation_steps": steps * parts}


def ppo(inputs, output_dir, processes, lora, reward=None, parts=1, **config):
    peft = {"peft_config": LoraConfig(task_type="CAUSAL_LM", **LORA)} if lora else {}
    trainer = tiny_ppo(
        output_dir,
        str(inputs / "policy"),
        reward or ([str(inputs / "reward")] if lora else topic_reward),
        **peft,
        **{**PPO, **(ONE_EPOCH if reward else {}), **micro_batches(2 // processes, 2, parts)}
        | {"save_strategy": "steps", **config},
        save_in_background=reward is None,  # each of the two ways to save has its workloads
    )
    if not lora:  # the third step of each rollout takes back the second
        controller = trainer.learning_rate_controller
        controller._went_too_far = lambda sums: len(controller._used) == 2
    return trainer


def others(kind, inputs, output_dir, processes, lora, parts=1):
    pairs = make_pairs()
    if kind == "sft":
        trainer_class, config_class = SFTTrainer, SFTConfig
        rows = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in pairs]
    else:
        trainer_class, config_class = {"dpo": (DPOTrainer, DPOConfig), "reward": (RewardTrainer, RewardConfig)}[kind]
        rows = pairs
    task_type = "SEQ_CLS" if kind == "reward" else "CAUSAL_LM"
    return trainer_class(
        model=str(inputs / "policy"),
        args=config_class(
            str(output_dir),
            **ON_CPU | {"save_strategy": "steps"},
            save_steps=2,
            max_steps=4,
            **micro_batches(4 // processes, 1, parts),
            learning_rate=1e-3,
            adam_epsilon=1e-5,
            activation_checkpointing=False,
            seed=7,
            **{} if kind == "reward" else {"max_length": 32},
            **{"beta_controller": "drift", "drift_target": 0.1} if kind == "dpo" else {},
            **{"sync_ref_model": True, "ref_model_sync_steps": 2} if kind == "dpo" and not lora else {},
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=tiny_tokenizer(),
        peft_config=LoraConfig(task_type=task_type, **LORA) if lora else None,
    )


KINDS = ("ppo", "separate", "gradient", "sft", "dpo", "reward")
WORKLOADS = [f"{kind}{lora}" for kind in KINDS for lora in ("", " lora")]
# Covered by another mode, or for DDP by tests/ppo and tests/dpo. `… resumed` is a workload that is resumed
WHOLE_WEIGHTS = {"sft lora", "reward lora", "dpo", "dpo resumed", "separate", "separate resumed", "separate lora"}
WHOLE_WEIGHTS |= {"separate lora resumed", "generation", "generation lora", "canary lora", "best lora", "recipes lora"}
PARTS = {"separate lora", "separate lora resumed", "ppo resumed", "dpo lora resumed"}
DDP = {"ppo resumed", "dpo lora resumed", "stop dpo", "reward raises", "not finite", "recipes"}
COVERED_ELSEWHERE = {
    "multi_gpu": WHOLE_WEIGHTS | DDP,
    "zero2": WHOLE_WEIGHTS | {"ppo lora resumed", "stop dpo", "recipes"},
    "fsdp2": PARTS | {"canary", "best", "recipes"},
    "zero3": PARTS | {"canary lora", "best lora", "generation lora", "stop dpo", "recipes lora"},
}


def is_left_out(name):
    mode = Path(sys.argv[1]).name
    if mode in ("multi_gpu", "zero2") and name.startswith("episodes"):
        return True  # where each process has the whole weights, it samples by itself
    return name in COVERED_ELSEWHERE[mode] and not os.environ.get("TRL_EXT_ALL_CASES")


def run(workload, inputs, folder, processes, resume=False, parts=1):
    kind, lora = workload.split()[0], workload.endswith("lora")
    output_dir = folder / workload
    checkpoint = str(output_dir / f"checkpoint-{4 if kind == 'ppo' else 2}") if resume else None
    if resume:
        output_dir = folder / f"{workload} resumed"
    randperm = torch.randperm
    if kind in ("ppo", "separate"):
        torch.randperm = lambda n, **kwargs: (
            torch.tensor(ORDER[processes]) if n == 8 // processes else randperm(n, **kwargs)
        )
    if kind in ("ppo", "separate", "gradient"):
        options = GRADIENT if kind == "gradient" else {"step_kl_target": 0.05} if kind == "ppo" else {}
        if kind == "separate":  # a reward model with a base of its own, and a reference that moves
            options = {"reward": [str(inputs / ("reward" if lora else "reward model"))], "share_reward_base": False}
            # A newly initialised critic adapter would be another one under ZeRO-3
            options |= {"value_model": str(inputs / "reward")} if lora else {"baseline": "gated"}
            options |= CORRECTED  # completions of another engine
        answering = skewed if kind == "separate" else scripted
        trainer = answering(ppo(inputs, output_dir, processes, lora, parts=parts, **options))
    else:
        trainer = others(kind, inputs, output_dir, processes, lora, parts)
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model()
    torch.randperm = randperm
    parameters = list(trainer.model.parameters())
    local = [p.to_local() if hasattr(p, "to_local") else p for p in parameters]
    names = ["loss", "grad_norm", "objective/kl", "objective/scores", "val/explained_variance"]
    names += ["sampling/ess", "sampling/clipfrac"]
    names += ["val/baseline_weight", "beta", "logps/drift", "rewards/margins"]
    controllers = {
        "separate": ["baseline_gate"],
        "ppo": ["kl_controller", "learning_rate_controller", "reward_normalizer"],
    }
    return {
        "type": str(trainer.accelerator.distributed_type),
        "processes": trainer.accelerator.num_processes,
        "wrapper": type(trainer.model_wrapped).__name__,
        "pieces": [
            [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
            for model in (trainer.model, getattr(trainer, "ref_model", None))
            if model is not None
        ],
        "resident": sum(p.numel() for p in local) / sum(getattr(p, "ds_numel", p.numel()) for p in parameters),
        "logs": [{name: log[name] for name in names if name in log} for log in trainer.state.log_history],
        "state": [
            {key: value for key, value in getattr(trainer, name).state_dict().items() if not isinstance(value, str)}
            for name in controllers.get(kind, [])
        ],
    }


class Gathers(TorchDispatchMode):
    """Counts the all-gathers of weights."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.name() == "c10d::_allgather_base_"
        return func(*args, **(kwargs or {}))


def generation(inputs, folder, lora):
    """The all-gathers of each rollout, which generates one prompt at a time, and the lengths of its completions."""
    trainer = ppo(
        inputs, folder, 2, lora, **ONE_EPOCH | {"local_rollout_forward_batch_size": 1, "save_strategy": "no"}
    )
    generate, seen = trainer._generate_single_turn, []

    def counted(*args):
        with Gathers() as gathers:
            answers, logprobs = generate(*args)
        seen.append((gathers.count, [len(ids) for ids in answers]))
        return answers, logprobs

    trainer._generate_single_turn = counted
    trainer.train()
    return seen


def canary(inputs, folder, lora):
    """Process 0's completions end at once, process 1's never."""
    trainer = others("sft", inputs, folder, 2, lora)
    trainer.add_callback(CanaryCallback(trainer=trainer, prompts=CANARY, minutes=0, max_new_tokens=12))
    trainer.train()


CANARY = ["flew", "was", "the"]
BEST = ONE_EPOCH | {
    "eval_strategy": "steps",
    "eval_steps": 2,
    "learning_rate": 3e-2,
    "load_best_model_at_end": True,
    "metric_for_best_model": "step",
    "greater_is_better": False,
}


class FirstIsBest(TrainerCallback):
    def on_evaluate(self, args, state, control, metrics, **kwargs):
        metrics["eval_step"] = state.global_step


def best(inputs, folder, lora):
    trainer = ppo(inputs, folder, 2, lora, eval_dataset=prompts(4, seed=9), **BEST)
    trainer.add_callback(FirstIsBest())
    trainer.train()
    trainer.save_model()
    return trainer.state.best_model_checkpoint


def chain(inputs, folder, lora):
    """Run the recipes: SFT, a reward model, PPO with both, and DPO."""
    common = {"use_cpu": "true", "bf16": "false", "dtype": "float32", "report_to": "none", "disable_tqdm": "true"}
    common |= {"max_steps": 2, "per_device_train_batch_size": 2, "learning_rate": 1e-3, "eval_strategy": "no"}
    common |= {"record_run": "false"}
    common |= {"use_peft": "true", "lora_target_modules": "all-linear"} if lora else {}
    start, base = inputs / "policy", inputs / "policy" if lora else folder / "sft"
    stages = {
        recipes.sft: {"model_name_or_path": start, "dataset_name": inputs / "answers"},
        recipes.reward: {"model_name_or_path": start, "dataset_name": inputs / "pairs"},
        recipes.ppo: {
            "model_name_or_path": base,
            "dataset_name": inputs / "pairs",
            "reward_model_name_or_path": folder / "reward",
            "max_completion_length": 8,
            "num_mini_batches": 1,
        },
        recipes.dpo: {"model_name_or_path": base, "dataset_name": inputs / "pairs"},
    }
    for recipe, settings in stages.items():
        settings |= common | {"output_dir": folder / recipe.__name__.rpartition(".")[2]}
        recipe.main([str(part) for name, value in settings.items() for part in (f"--{name}", value)])
        torch.distributed.barrier()  # the next stage reads this one's output
        state.AcceleratorState._reset_state(reset_partial_state=False)


class OnProcess1(TrainerCallback):
    def __init__(self, act):
        self.act = act

    def on_step_end(self, args, state, control, **kwargs):
        if args.process_index == 1 and state.global_step == 2:
            self.act(control)


def stop_request(inputs, folder, kind):
    def stop(control):
        control.should_save = control.should_training_stop = True

    trainer = others("dpo", inputs, folder, 2, False) if kind == "dpo" else ppo(inputs, folder, 2, False)
    trainer.add_callback(OnProcess1(stop))
    return raised_by(trainer), trainer.state.global_step


def warmup(inputs, folder):
    """The roles that each of three steps trains, the first one for the critic alone; or the error message."""
    config = {"critic_warmup_rollouts": 1, "num_ppo_epochs": 1, "num_mini_batches": 1}
    try:
        trainer = ppo(inputs, folder, 2, False, **config, max_steps=3, save_strategy="no")
    except ValueError as error:
        return str(error)

    def whole():
        named = trainer.accelerator.unwrap_model(trainer.model).named_parameters()
        return {n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for n, p in named}

    trainer.add_callback(watch := EachStep(whole))
    trainer.train()
    pairs = zip(watch.seen, watch.seen[1:], strict=False)
    return [sorted({name.split(".")[0] for name in a if not torch.equal(a[name], b[name])}) for a, b in pairs]


def episodes(inputs, folder, gathers):
    """One step on an environment where only process 1 calls tools; its scores, and the rows of each generation."""
    sizes = {"per_device_train_batch_size": 4, "local_rollout_forward_batch_size": 1}
    config = {**TOGETHER, "max_steps": 1, **sizes, "ds3_gather_for_generation": gathers}
    trainer = make_agent(folder, policy=str(inputs / "agent"), **config)
    generate, rows = trainer._generate_completions, []
    player = counts if trainer.accelerator.process_index else lambda history: "Done.<|im_end|>"
    scripted_answers = played_by(trainer, player)._generate_completions

    def counted(prompt_ids, *args, **kwargs):
        rows.append(len(prompt_ids))
        trainer._tokens_left = lambda _: 2 + trainer.accelerator.process_index
        generate(prompt_ids, *args, **kwargs)  # a collective
        return scripted_answers(prompt_ids)

    trainer._generate_completions = counted
    trainer.train()
    return {"scores": trainer.state.log_history[0]["objective/scores"], "rows": rows}


def fail(inputs, folder):
    """Generation, the best weights, and events on one process alone; the last one ends the launch."""
    cases = {
        "generation": lambda out: generation(inputs, out, lora=False),
        "generation lora": lambda out: generation(inputs, out, lora=True),
        "canary": lambda out: canary(inputs, out, lora=False),
        "canary lora": lambda out: canary(inputs, out, lora=True),
        "best": lambda out: best(inputs, out, lora=False),
        "best lora": lambda out: best(inputs, out, lora=True),
        "recipes": lambda out: chain(inputs, out, lora=False),
        "recipes lora": lambda out: chain(inputs, out, lora=True),
        "stop ppo": lambda out: stop_request(inputs, out, "ppo"),
        "stop dpo": lambda out: stop_request(inputs, out, "dpo"),
        "warm-up": lambda out: warmup(inputs, out),
        "episodes": lambda out: episodes(inputs, out, gathers=True),
        "episodes layer by layer": lambda out: episodes(inputs, out, gathers=False),
        "reward raises": lambda out: reward_mistake(out, "raises", str(inputs / "policy")),
        "not finite": lambda out: raised_by(with_nan(ppo(inputs, out, 2, False))),
    }
    results = {}
    for name, case in cases.items():
        if is_left_out(name):
            continue
        results[name] = case(folder / name)
        state.AcceleratorState._reset_state(reset_partial_state=False)
    yield results

    def die(control):
        (folder / "died").write_text(str(time.time()))
        raise ValueError("process 1 has had enough")

    trainer = ppo(inputs, folder / "raises", 2, False)
    trainer.add_callback(OnProcess1(die))
    trainer.train()


def train(inputs, folder, resume):
    results = {}
    for workload in WORKLOADS:
        if is_left_out(f"{workload} resumed" if resume else workload):
            continue
        if resume and workload.split()[0] in ("gradient", "sft", "reward"):
            continue  # the first saves none, the others are TRL's
        results[workload] = run(workload, inputs, folder, int(os.environ["WORLD_SIZE"]), resume)
        state.AcceleratorState._reset_state(reset_partial_state=False)  # the next one has its own DeepSpeed settings
    yield results


def main(folder, *kinds):
    inputs = folder.parent / "inputs"
    for what in kinds:
        steps = fail(inputs, folder) if what == "fail" else train(inputs, folder, what == "resume")
        for results in steps:
            torch.save(results, folder / f"{what} {os.environ['RANK']}.pt")


if __name__ == "__main__":
    spare_time()
    main(Path(sys.argv[1]), *sys.argv[2:])
