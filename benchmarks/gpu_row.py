"""One row of gpu.py: a rollout and its update, measured in the process that calls it."""

import gc
import inspect
import math
import time

from torch.nn.attention.varlen import varlen_attn as VARLEN_ATTN
from transformers.utils import is_triton_available

from trl_ext.models.packing import use_varlen

PROMPT, COMPLETION, ROWS, MICRO, STEPS = 512, 512, 64, 8, 4  # tokens, tokens, completions, rows, optimizer steps
WARM_UP = 16  # tokens
PAD, BOS, EOS = range(3)
SHAPES = {  # of Qwen2.5's config.json
    name: dict(
        zip(
            (
                "hidden_size",
                "intermediate_size",
                "num_hidden_layers",
                "num_attention_heads",
                "num_key_value_heads",
                "vocab_size",
                "tie_word_embeddings",
            ),
            shape,
            strict=True,
        )
    )
    for name, shape in {
        "tiny": (64, 128, 2, 4, 2, 500, True),
        "0.5B": (896, 4864, 24, 14, 2, 151_936, True),
        "1.5B": (1536, 8960, 28, 12, 2, 151_936, True),
        "7B": (3584, 18944, 28, 28, 4, 152_064, False),
    }.items()
}
LORA = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
_REAL = {"prompt": PROMPT, "completion": COMPLETION, "rows": ROWS, "micro": MICRO, "generations": 8}
MODES = {
    "lora-tiny": {"size": "tiny", "prompt": 8, "completion": 24, "rows": 8, "micro": 1, "generations": 2},
    "full-0.5B": {"size": "0.5B", **_REAL},
    "lora-1.5B": {"size": "1.5B", **_REAL},
    "lora-7B": {"size": "7B", "checkpointing": True, **_REAL},
    "qlora-7B": {"size": "7B", "checkpointing": True, **_REAL, "micro": 4},
}
SIDES = {
    "critic": "ours, critic",
    "roles": "ours, critic and reward model",  # four models on one base
    "mean": "ours, `baseline: mean`",
    "grpo": "TRL GRPO",
}


def measure(settings, folder):
    """Return what is measured of a row, which is run in a folder; raise what goes wrong."""
    import torch
    from transformers import TrainerCallback

    device = torch.device(settings["device"])
    is_cuda = device.type == "cuda"
    without(settings["without"])
    left = torch.cuda.memory_allocated() if is_cuda else 0  # by the row before: nothing
    phases, lengths = Phases(is_cuda), ForcedLengths(settings)
    policy = build(settings, device)
    if settings["draws"]:
        with_processor(policy, lengths)
    config = policy.config
    if settings["side"] == "roles" or settings["mode"].startswith("qlora"):
        policy = save(policy, settings, f"{folder}/base")
        gc.collect()
    trainer = make_trainer(settings, folder, policy)
    if not settings["draws"]:
        trainer._generate_single_turn = lambda prompt_ids, *_, **__: (lengths.answers(len(prompt_ids)), None)
    timed(trainer, phases, lengths)

    class Finite(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            assert all(math.isfinite(v) for k, v in logs.items() if "loss" in k and isinstance(v, float)), logs

    trainer.add_callback(Finite())
    weights = [p for p in trainer.model.parameters() if p.requires_grad]
    before = [p.detach().float().sum().item() for p in weights]
    trainer.train()
    phases.enter("end")
    moved = sum(a != p.detach().float().sum().item() for a, p in zip(before, weights, strict=True))
    assert trainer.state.global_step == 2 * STEPS and 2 * moved >= len(weights), (trainer.state.global_step, moved)
    logs = [log for log in trainer.state.log_history if "loss" in log or "step_time" in log]
    return {
        "seconds": {name: phases.seconds[name] for name in ("generation", "passes", "update")},
        "bytes": {name: phases.bytes[name] for name in ("generation", "passes", "update")},
        "left": left,
        "lengths": lengths.drawn,
        "trained": sum(p.numel() for p in weights),
        "attention": config._attn_implementation,
        "gpu": torch.cuda.get_device_name() if is_cuda else "cpu",
        "log": logs[-1],
    }


class Phases:
    """Seconds and peak bytes of each phase of the last rollout."""

    def __init__(self, is_cuda):
        self.is_cuda, self.name = is_cuda, "start"
        self.seconds, self.bytes, self.start = {}, {}, time.perf_counter()

    def enter(self, name):
        import torch

        if self.is_cuda:
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds[self.name] = self.seconds.get(self.name, 0.0) + now - self.start
        peak = torch.cuda.max_memory_allocated() if self.is_cuda else 0
        self.bytes[self.name] = max(self.bytes.get(self.name, 0), peak)
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats()
        self.name, self.start = name, time.perf_counter()

    def forget(self):
        self.seconds, self.bytes = {}, {"start": self.bytes.get("start", 0)}


class ForcedLengths:
    """A logits processor that ends the answers at their lengths; those of the first rollout are short."""

    def __init__(self, settings):
        self.settings, self.rollout, self.drawn, self.lengths = settings, 0, [], None

    def __call__(self, input_ids, scores):
        import torch

        position = input_ids.size(1) - self.settings["prompt"]
        if not position:
            self.lengths = self.next(len(input_ids)).to(scores.device)
        if len(self.lengths) > len(scores):  # ours goes on without the rows that have ended
            self.lengths = self.lengths[self.lengths > position]
        scores[:, PAD] = -math.inf
        ends = (self.lengths <= position + 1)[:, None]
        scores[:, EOS] = -math.inf
        scores = scores.masked_fill(ends, -math.inf)
        scores[:, EOS] = torch.where(ends[:, 0], 0.0, -math.inf)
        return scores

    def next(self, rows):
        """The (B,) lengths of the answers that are drawn next."""
        import torch

        longest = WARM_UP if self.rollout == 0 else self.settings["completion"]
        spread = (torch.arange(rows) * 37 % rows + 1) / rows
        share = spread.square() if self.settings["lengths"] == "varying" else torch.ones_like(spread)
        lengths = (longest * share).round().clamp(1, longest).long()
        self.drawn = (self.drawn if self.rollout else []) + lengths.tolist()
        return lengths

    def answers(self, rows):
        """Answers that no model draws."""
        import torch

        vocabulary = SHAPES[self.settings["size"]]["vocab_size"]
        return [torch.randint(4, vocabulary, (n - 1,)).tolist() + [EOS] for n in self.next(rows).tolist()]


def without(what):
    """Leave out a fast path, to measure what it gives."""
    from torch.nn.attention import varlen

    import trl_ext.models.lm_head as head
    import trl_ext.ppo.passes as passes

    passes.use_varlen = (lambda *_: None) if "varlen" in what else use_varlen
    head.is_triton_available = (lambda: False) if "kernel" in what else is_triton_available
    if "enable_gqa" not in inspect.signature(VARLEN_ATTN).parameters:  # torch 2.11 takes fewer heads of keys as it is
        varlen.varlen_attn = lambda *args, enable_gqa, **kwargs: VARLEN_ATTN(*args, **kwargs)


def with_processor(model, processor):
    generate = model.generate
    model.generate = lambda *args, logits_processor=(), **kwargs: generate(
        *args, logits_processor=[processor, *logits_processor], **kwargs
    )


def timed(trainer, phases, lengths):
    """Cut the run into phases; what is measured of the first rollout is forgotten."""
    collect, generate = trainer._generate_and_score_completions, trainer._generate_single_turn

    def timed_collect(*args, **kwargs):
        phases.enter("passes")
        if trainer.state.global_step:
            lengths.rollout, lengths.drawn = 1, []
            phases.forget()
        outputs = collect(*args, **kwargs)
        phases.enter("update")
        return outputs

    def timed_generate(*args, **kwargs):
        phases.enter("generation")
        answers = generate(*args, **kwargs)
        phases.enter("passes")
        return answers

    trainer._generate_and_score_completions, trainer._generate_single_turn = timed_collect, timed_generate


def config_of(settings):
    from transformers import AutoConfig

    shape = SHAPES[settings["size"]]
    tokens = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
    return AutoConfig.for_model("qwen2", max_position_embeddings=32_768, **tokens, **shape)


def build(settings, device):
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config_of(settings), dtype=dtype)


def tokenizer_of(settings):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{i}" for i in range(4, SHAPES[settings["size"]]["vocab_size"]))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokens = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", **tokens)


def prompts(settings, count):
    import torch
    from datasets import Dataset

    generator = torch.Generator().manual_seed(1)
    vocabulary = SHAPES[settings["size"]]["vocab_size"]
    ids = torch.randint(4, vocabulary, (count, settings["prompt"]), generator=generator)
    return Dataset.from_dict({"prompt": [" ".join(f"w{i}" for i in row) for row in ids.tolist()]})


def reward(completion_ids, **kwargs):
    return [len(ids) % 7 + sum(ids) % 11 / 11 for ids in completion_ids]


def arguments(settings, folder):
    return {
        "output_dir": folder,
        "per_device_train_batch_size": settings["micro"],
        "gradient_accumulation_steps": settings["rows"] // STEPS // settings["micro"],
        "max_completion_length": settings["completion"],
        "max_steps": 2 * STEPS,
        "learning_rate": 1e-6,
        "lr_scheduler_type": "constant",
        "use_cpu": settings["device"] == "cpu",
        "bf16": settings["device"] == "cuda",
        "gradient_checkpointing": settings.get("checkpointing", False),
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": STEPS,
        "temperature": 1.0,
        "shuffle_dataset": False,
    }


def ppo_config(settings, folder):
    from trl_ext import PPOConfig

    return PPOConfig(
        **arguments(settings, folder),
        num_mini_batches=STEPS,
        num_ppo_epochs=1,
        record_run=False,
        watch="off",
        kl_coef=0.05,
        baseline="mean" if settings["side"] == "mean" else "critic",
        **({"num_generations": settings["generations"]} if settings["side"] == "mean" else {}),
        **settings["options"],
    )


def is_lora(settings):
    return "lora" in settings["mode"]


def peft_config(settings):
    from peft import LoraConfig

    return LoraConfig(**LORA) if is_lora(settings) else None


def save(policy, settings, path):
    """Save a base, and beside it the adapter of a reward model with a random head; return the base's path."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForSequenceClassification

    policy.save_pretrained(path)
    classifier = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1, dtype=policy.dtype)
    adapter = LoraConfig(**{**LORA, "task_type": "SEQ_CLS"})
    get_peft_model(classifier, adapter).save_pretrained(f"{path}-reward")
    for folder in (path, f"{path}-reward"):
        tokenizer_of(settings).save_pretrained(folder)
    return path


def make_trainer(settings, folder, policy):
    common = {
        "model": policy,
        "reward_funcs": f"{policy}-reward" if settings["side"] == "roles" else reward,
        "processing_class": tokenizer_of(settings),
        "peft_config": peft_config(settings),
    }
    if settings["side"] != "grpo":
        from trl_ext import PPOTrainer

        args = ppo_config(settings, folder)
        if isinstance(policy, str):
            args.model_init_kwargs = {"dtype": "bfloat16" if args.bf16 else "float32", "device_map": None}
        if settings["mode"].startswith("qlora"):
            import torch
            from transformers import BitsAndBytesConfig

            four = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16}
            common["quantization_config"] = BitsAndBytesConfig(**four)
        data = prompts(settings, 2 * settings["rows"] // (args.num_generations or 1))
        return PPOTrainer(args=args, train_dataset=data, **common)
    from trl import GRPOConfig, GRPOTrainer

    if common["peft_config"] is None:  # it loads its reference from where the policy came from
        policy.save_pretrained(f"{folder}/sft")
        policy.config._name_or_path = f"{folder}/sft"
    args = GRPOConfig(
        **arguments(settings, folder),
        steps_per_generation=settings["rows"] // settings["micro"],
        num_generations=settings["generations"],
        num_iterations=1,
        top_k=0,
        beta=0.05,
    )
    return GRPOTrainer(
        args=args, train_dataset=prompts(settings, 2 * settings["rows"] // settings["generations"]), **common
    )


def planned_bytes(settings):
    """Bytes of the peak that `trl-ext plan` predicts."""
    import torch

    from trl_ext.workbench.planning import Job, plan

    args = ppo_config({**settings, "device": "cpu"}, "unused")
    args.bf16 = settings["device"] == "cuda"
    args.use_cpu = not args.bf16
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    more = {"dtype": dtype, "peft_config": peft_config(settings), "prompt_length": settings["prompt"]}
    more |= {"shared_rewards": int(settings["side"] == "roles")}
    more |= {"bits": 4 if settings["mode"].startswith("qlora") else None}
    return plan(Job("ppo", args, config_of(settings), **more)).peak
