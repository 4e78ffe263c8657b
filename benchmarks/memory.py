"""
What LoRA PPO with all four roles on one base needs in memory and time, beside TRL 1.12's PPO and SFT.

    python benchmarks/memory.py --trl112 PATH      # a folder in which TRL 1.12's wheel was unpacked
    python benchmarks/memory.py --device cuda      # never run so far: it was written without a GPU at hand

Models are built from config with random weights; nothing is downloaded. Every case runs in a process of its own, one
at a time, and the repeats alternate between cases. On CPU a figure is the peak of the resident set minus the resident
set after the imports (`VmHWM`, reset by `/proc/self/clear_refs`); on a GPU it is `torch.cuda.max_memory_allocated`.
Both cover the construction of models and trainer, rollouts, backward passes and optimizer steps with their state.
A resident set includes what glibc keeps of freed memory, a few hundred MiB in each case; with `MALLOC_TRIM_THRESHOLD_`
and `MALLOC_MMAP_THRESHOLD_` set to 131072 in the environment it is close to what is in use.

All cases have the same base, batch, sequence length, dtype and activation checkpointing, the same LoRA where there is
one, and fp32 Adam states where the weights are fp32. What TRL 1.12 cannot do is done for it here: it ignores
`gradient_checkpointing` in PPO, so its models get it by hand, and it trains all weights of the value model, so that a
second case gives that model an adapter.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SHAPES = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
    "medium": {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8, "num_attention_heads": 8},
    "0.5B": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
    "1.5B": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
    },
}
VOCABULARY = 151_936
PPO_EPOCHS = 2  # passes over a rollout of one minibatch
LORA = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}


# ---- Models and data ----


def base(settings, classifier=False):
    """The same backbone each time: weights are drawn before those of the head."""
    import torch
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        LlamaForSequenceClassification,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen2ForSequenceClassification,
    )

    names = {True: (Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification)}
    config_class, causal_lm, sequence_classifier = names.get(
        settings.shape.endswith("B"), (LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification)
    )
    config = config_class(
        vocab_size=VOCABULARY,
        max_position_embeddings=2048,
        tie_word_embeddings=not settings.untied,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        num_labels=1,
        dtype=settings.dtype,
        **SHAPES[settings.shape],
    )
    torch.manual_seed(0)
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, settings.dtype))
    try:
        return (sequence_classifier if classifier else causal_lm)(config)
    finally:
        torch.set_default_dtype(default_dtype)


def tokenizer(vocabulary=VOCABULARY):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{i}" for i in range(4, vocabulary))]
    words_only = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    words_only.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokens = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=words_only, padding_side="left", **tokens)


def rows(settings, length, as_text=False):
    import torch
    from datasets import Dataset

    ids = torch.randint(4, VOCABULARY, (16 * settings.batch, length), generator=torch.Generator().manual_seed(0))
    if as_text:
        return Dataset.from_dict({"prompt": [" ".join(f"w{i}" for i in row) for row in ids.tolist()]})
    return Dataset.from_dict({"input_ids": ids.tolist()})


def reward_adapter(settings, folder):
    """Write a reward model that is an adapter on the base; its weights are random, too."""
    import torch
    from peft import LoraConfig, get_peft_model

    from trl_ext import save_base_fingerprint

    classifier = base(settings, classifier=True)
    classifier.model = base(settings).model
    model = get_peft_model(classifier, LoraConfig(task_type="SEQ_CLS", **LORA))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    model.save_pretrained(folder, save_embedding_layers=False)
    save_base_fingerprint(model, folder)
    tokenizer().save_pretrained(folder)


# ---- Cases: each yields when its imports are done, then its trainer ----


def arguments(settings, folder):
    """Settings that all trainers share."""
    return {
        "output_dir": str(folder / "output"),
        "per_device_train_batch_size": settings.batch,
        "gradient_accumulation_steps": 1,
        "learning_rate": 1e-3,  # bfloat16 would round the updates of a small one away
        "use_cpu": settings.device == "cpu",
        "bf16": settings.dtype == "bfloat16",
        "gradient_checkpointing": settings.checkpointing,
        "gradient_checkpointing_kwargs": {"use_reentrant": False} if settings.checkpointing else None,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 1000,
        "dataloader_pin_memory": False,
    }


def sft(settings, folder, lora):
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    yield
    length = settings.prompt + settings.response
    yield SFTTrainer(
        model=base(settings),
        args=SFTConfig(
            **arguments(settings, folder), max_steps=settings.rollouts * PPO_EPOCHS, max_length=length, packing=False
        ),
        train_dataset=rows(settings, length),
        processing_class=tokenizer(),
        peft_config=LoraConfig(task_type="CAUSAL_LM", **LORA) if lora else None,
    )


def ppo_settings(settings):
    return {
        "total_episodes": settings.rollouts * settings.batch,
        "num_ppo_epochs": PPO_EPOCHS,
        "num_mini_batches": 1,
        "local_rollout_forward_batch_size": settings.batch,
        "temperature": 1.0,
    }


def ppo(settings, folder, lora=True, shared=True):
    from peft import LoraConfig

    from trl_ext import PPOConfig, PPOTrainer

    yield
    yield PPOTrainer(
        model=base(settings),
        reward_funcs=str(folder / "reward") if shared else base(settings, classifier=True),
        value_model=None if shared else base(settings, classifier=True),
        args=PPOConfig(
            **arguments(settings, folder),
            **ppo_settings(settings),
            max_completion_length=settings.response,
            share_reward_base=shared,
            record_run=False,
        ),
        train_dataset=rows(settings, settings.prompt, as_text=True),
        processing_class=tokenizer(),
        reward_processing_classes=tokenizer(),
        peft_config=LoraConfig(task_type="CAUSAL_LM", **LORA) if lora else None,
    )


def trl_112(settings, folder, value_adapter):
    import trl
    from peft import LoraConfig, inject_adapter_in_model
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    if not trl.__version__.startswith("1.12."):
        raise ImportError(f"`--trl112` has TRL {trl.__version__}: unpack a wheel of 1.12 there.")
    yield
    policy = base(settings)
    value_model, reward_model = (base(settings, classifier=True) for _ in range(2))
    if value_adapter:
        inject_adapter_in_model(LoraConfig(**LORA | {"exclude_modules": ["score"]}), value_model)
        value_model.score.requires_grad_(True)
    if settings.checkpointing:
        for model in (policy, value_model):
            model.gradient_checkpointing_enable({"use_reentrant": False})
    yield PPOTrainer(
        args=PPOConfig(
            **arguments(settings, folder),
            **ppo_settings(settings),
            response_length=settings.response,
            num_sample_generations=0,
        ),
        processing_class=tokenizer(),
        model=policy,
        ref_model=None,  # the base with its adapter off
        reward_model=reward_model,
        value_model=value_model,
        train_dataset=rows(settings, settings.prompt),
        peft_config=LoraConfig(task_type="CAUSAL_LM", **LORA),
    )


SHARED, SEPARATE, FULL = "LoRA PPO, one base", "LoRA PPO, separate critic and reward model", "full-parameter PPO"
TRL_112, TRL_112_ADAPTER = "(a) TRL 1.12 LoRA PPO", "(a) with an adapter on the value model, too"
SFT_FULL, SFT_LORA = "(b) full-parameter SFT", "(c) LoRA SFT"
CASES = {
    SHARED: lambda *args: ppo(*args),
    SEPARATE: lambda *args: ppo(*args, shared=False),
    FULL: lambda *args: ppo(*args, lora=False, shared=False),
    TRL_112: lambda *args: trl_112(*args, value_adapter=False),
    TRL_112_ADAPTER: lambda *args: trl_112(*args, value_adapter=True),
    SFT_FULL: lambda *args: sft(*args, lora=False),
    SFT_LORA: lambda *args: sft(*args, lora=True),
}
AIMS = {TRL_112: 0.5, SFT_FULL: 0.6, SFT_LORA: 1.4}


# ---- Measuring ----


def resident(field):
    """MiB of this process: `VmRSS` now, `VmHWM` the most since the last reset."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status[field].split()[0]) / 1024


def reset_peak(device):
    if device == "cuda":
        import torch

        torch.cuda.init()
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")


def peak(device):
    if device == "cuda":
        import torch

        return torch.cuda.max_memory_allocated() / 2**20
    return resident("VmHWM")


def run_case(settings, folder):
    import torch
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def __init__(self):
            self.ends = []

        def on_step_end(self, args, state, control, **kwargs):
            if settings.device == "cuda":
                torch.cuda.synchronize()
            self.ends.append(time.perf_counter())

    case = CASES[settings.case](settings, folder)
    next(case)
    after_imports = 0.0 if settings.device == "cuda" else resident("VmRSS")
    reset_peak(settings.device)
    trainer = next(case)
    built = peak(settings.device) - after_imports
    reset_peak(settings.device)
    clock = Clock()
    trainer.add_callback(clock)
    trainer.train()
    trained = peak(settings.device) - after_imports
    steps = len(clock.ends) // settings.rollouts  # TRL 1.12 calls a rollout with its steps one step
    seconds = clock.ends[-1] - clock.ends[steps - 1]  # the first rollout warms up
    return {
        "peak": max(built, trained),
        "built": built,
        "seconds": seconds / ((settings.rollouts - 1) * settings.batch),
    }


# ---- All cases ----


def run(case, options, folder, trl_112_path):
    command = [sys.executable, __file__, "--case", case, "--folder", str(folder), *options]
    env = dict(os.environ)
    if case.startswith("(a)"):
        env["PYTHONPATH"] = os.pathsep.join([str(Path(trl_112_path).resolve()), env.get("PYTHONPATH", "")])
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"'{case}' ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def spread(values, digits):
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def report(settings, measured):
    """A Markdown table: medians, with the least and the most of the repeats."""
    import torch

    on_gpu = settings.device == "cuda"
    where = torch.cuda.get_device_name() if on_gpu else f"{torch.get_num_threads()} CPU threads"
    lines = [
        f"{settings.shape} ({SHAPES[settings.shape]}, vocabulary {VOCABULARY}, "
        f"{'untied' if settings.untied else 'tied'} embeddings), {settings.dtype}, "
        f"{settings.prompt} + {settings.response} tokens, {settings.batch} rows a step and a rollout, "
        f"{settings.rollouts} rollouts of {PPO_EPOCHS} PPO epochs ({settings.rollouts * PPO_EPOCHS} optimizer steps "
        f"each), activation checkpointing {'on' if settings.checkpointing else 'off'}, LoRA {LORA}, "
        f"{where}, {settings.repeats} repeats, torch {torch.__version__}",
        "",
        f"| case | peak MiB | {SHARED} ÷ case | aim | s / episode | {SHARED} ÷ case |",
        "|---|---|---|---|---|---|",
    ]
    for case in CASES:
        aim = f"≤ {AIMS[case]}" if case in AIMS else ""
        if not measured[case]:
            lines.append(f"| {case} | not run |  | {aim} |  |  |")
            continue
        cells = {}
        for quantity, digits in (("peak", 0), ("seconds", 2)):
            values = [result[quantity] for result in measured[case]]
            ours = [result[quantity] for result in measured[SHARED]]
            ratios = [a / b for a, b in zip(ours, values, strict=False)]
            cells[quantity] = [spread(values, digits), spread(ratios, 2) if ratios and case != SHARED else ""]
        times = ["", ""] if "SFT" in case else cells["seconds"]
        lines.append(f"| {' | '.join([case, *cells['peak'], aim, *times])} |")
    if on_gpu:
        lines += ["", "Hydra-PPO (arXiv:2309.00754) reports 71 GB, against 220 GB for full PPO: a ratio of 0.32."]
    return "\n".join(lines)


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0].strip())
    parser.add_argument("--trl112", help="folder with TRL 1.12's `trl` package; its cases are not run without")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--shape", choices=SHAPES, action="append", help="default: medium; on cuda 0.5B and 1.5B")
    parser.add_argument("--cases", nargs="+", choices=CASES, help="default: all; on cpu, without full-parameter PPO")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: float32; on cuda bfloat16")
    parser.add_argument("--untied", action="store_true", help="an LM head with weights of its own")
    parser.add_argument("--no-checkpointing", dest="checkpointing", action="store_false")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=96, help="tokens")
    parser.add_argument("--response", type=int, default=32, help="tokens")
    parser.add_argument("--rollouts", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--case", choices=[*CASES, "reward"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    settings = parser.parse_args()
    settings.dtype = settings.dtype or ("bfloat16" if settings.device == "cuda" else "float32")
    if settings.rollouts < 2:
        parser.error("`--rollouts` must be at least 2: the first one is not timed.")
    return settings


def main():
    settings = parse_args()
    if settings.case:
        settings.shape = settings.shape[0]
        if settings.case == "reward":
            reward_adapter(settings, settings.folder / "reward")
            print("{}")
        else:
            print(json.dumps(run_case(settings, settings.folder)))
        return
    cases = settings.cases or [case for case in CASES if settings.device == "cuda" or case != FULL]
    if not settings.trl112:
        cases = [case for case in cases if not case.startswith("(a)")]
    for shape in settings.shape or (["medium"] if settings.device == "cpu" else ["0.5B", "1.5B"]):
        settings.shape = shape
        options = ["--shape", shape]
        for name in ("device", "dtype", "batch", "prompt", "response", "rollouts"):
            options += [f"--{name}", str(getattr(settings, name))]
        options += ["--untied"] * settings.untied + ["--no-checkpointing"] * (not settings.checkpointing)
        measured = {case: [] for case in CASES}
        with tempfile.TemporaryDirectory() as folder:
            run("reward", options, folder, None)
            for _ in range(settings.repeats):
                for case in cases:
                    measured[case].append(run(case, options, folder, settings.trl112))
                    print(case, measured[case][-1], file=sys.stderr, flush=True)
        print(report(settings, measured), flush=True)


if __name__ == "__main__":
    main()
