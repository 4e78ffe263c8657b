"""Teach a small model to call an environment's tools: make a tokenizer and a model, and imitate a player by SFT.

    python -m recipes.agents.teach frozen_lake
    python -m recipes.agents.teach path/to/my_game.py:Environment

Give the name of a module beside this one, or a class as for `environment` of `trl-ext ppo`. The module has `rows`
(starts of episodes), a `Player`, `MISTAKES` (the share of mistakes of the player that SFT imitates), and an
`Environment`; or else `Environment = None`, a reward function `correct` and, if tools are called, `TOOLS`. The output
folder gets the model in `sft/`, and in `rows/` the starts that `trl-ext ppo --config agents/NAME` trains and evaluates
on.
"""

import argparse
import importlib
import json
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import trl
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import get_json_schema

from trl_ext.upstream import quiet

NAMES = ["weather", "frozen_lake", "nim", "reasoning", "guess"]
MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TAGS = ["<tool_call>", "</tool_call>", "<think>", "</think>", "<tool_response>", "</tool_response>"]


def play(environment: Any, row: dict[str, Any], player: Any) -> list[dict[str, Any]]:
    """Return the messages of an episode that a scripted player plays with an environment or module from [`start`]."""
    prompt = [dict(message) for message in row["prompt"]]
    if hasattr(environment, "reset"):
        prompt[-1]["content"] += environment.reset(**{key: value for key, value in row.items() if key != "prompt"})
    said = prompt[-1]["content"]
    messages = prompt
    while isinstance(answer := player(said), tuple):
        name, arguments = answer
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        said = str(getattr(environment, name)(**arguments))
        messages = [*messages, {"role": "assistant", "content": "", "tool_calls": [call]}]
        messages.append({"role": "tool", "name": name, "content": said})
    return [*messages, {"role": "assistant", "content": answer}]


def success(module: ModuleType, player: Any, count: int = 500) -> float:
    """Return a player's mean reward over the starts of the evaluation set."""
    environment = start(module)
    total = 0.0
    for row in module.rows(count, seed=1):
        episode = play(environment, row, player)
        columns = {name: [value] for name, value in row.items()}
        total += environment.get_reward() if module.Environment else module.correct([episode[-1:]], **columns)[0]
    return total / count


def start(module: ModuleType) -> Any:
    """
    Return an instance of a module's `Environment`, or if it has none, the module itself, whose functions are tools.
    """
    return module.Environment() if module.Environment else module


def schemas(environment: Any) -> list[dict[str, Any]]:
    """Return the JSON schemas of the tools of an environment or module, for a chat template."""
    if isinstance(environment, ModuleType):
        return [get_json_schema(tool) for tool in getattr(environment, "TOOLS", [])]
    named = [name for name in vars(type(environment)) if not name.startswith("_")]
    return [get_json_schema(getattr(environment, name)) for name in named if name not in ("reset", "get_reward")]


def make_tokenizer(texts: list[str], size: int, split: str = "\n") -> PreTrainedTokenizerFast:
    """Train a tokenizer on these texts; no token reaches across a match of the regular expression `split`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=MARKS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, padding_side="left", eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    fast.add_tokens(TAGS)
    fast.chat_template = template()
    return fast


def template() -> str:
    """Return Qwen3's chat template, from TRL."""
    return (Path(trl.__file__).parent / "chat_templates" / "qwen3_instruct_2507.jinja").read_text()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m recipes.agents.teach", description=__doc__.splitlines()[0])
    parser.add_argument("name", help=f"{', '.join(NAMES)}, or path/to/file.py:Environment")
    parser.add_argument("--output_dir", type=Path, help="default: outputs/agents/NAME")
    parser.add_argument("--episodes", type=int, help="to imitate; default: 2000, or the module's EPISODES")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    quiet()  # before the libraries that are imported next
    from trl_ext.rewards import load_object

    try:
        if args.name in NAMES:
            module = importlib.import_module(f"{__package__}.{args.name}")
        else:
            module = sys.modules[load_object(args.name, "environment").__module__]
    except ImportError as error:
        parser.error(str(error))
    output = args.output_dir or Path("outputs/agents") / Path(args.name.rpartition(":")[0] or args.name).stem
    begin = time.time()
    teach(module, output, args.seed, args.episodes)
    imitated = success(module, module.Player(module.MISTAKES, seed=args.seed))
    print(
        f"Model: {output / 'sft'}, after {time.time() - begin:.0f} s. Success of the player without mistakes: "
        f"{success(module, module.Player()):.2f}; of the imitated player: {imitated:.2f}"
    )


def teach(module: ModuleType, output: Path, seed: int, count: int | None = None) -> None:
    """
    Write `sft/`, a model that imitates a module's player in `count` episodes (None: the module's `EPISODES`, or
    2,000), and `rows/`.
    """
    from transformers import set_seed
    from trl import SFTConfig, SFTTrainer

    set_seed(seed)
    count = count or getattr(module, "EPISODES", 2000)
    player = module.Player(module.MISTAKES, seed=seed)
    environment = start(module)
    episodes = [play(environment, row, player) for row in module.rows(count, seed=2 + seed)]
    shown = schemas(environment)
    plain = make_tokenizer([], 300)
    texts = [plain.apply_chat_template(episode, tools=shown, tokenize=False) for episode in episodes[:300]]
    tokenizer = make_tokenizer(texts, getattr(module, "VOCABULARY", 1000), getattr(module, "SPLIT", "\n"))
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=2048,
        initializer_range=0.1,  # with 0.02 so narrow a model would not learn in minutes to look back
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
    )
    rows = [{"messages": episode, "tools": json.dumps(shown)} for episode in episodes]
    trainer = SFTTrainer(
        LlamaForCausalLM(config),
        args=SFTConfig(
            str(output / "sft"),
            use_cpu=True,
            bf16=False,
            report_to="none",
            per_device_train_batch_size=8,
            learning_rate=3e-3,
            lr_scheduler_type="cosine",
            num_train_epochs=2,
            assistant_only_loss=True,
            max_length=1024,
            logging_steps=25,
            save_strategy="no",
            activation_checkpointing=False,
            seed=seed,
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    trainer.train()
    tokenizer.chat_template = template()  # SFT has marked in it what the assistant says
    trainer.model.save_pretrained(output / "sft")
    tokenizer.save_pretrained(output / "sft")
    (output / "rows").mkdir(parents=True, exist_ok=True)
    for split, count, seed in (("train", 4000, 0), ("test", 200, 1)):
        lines = (json.dumps(row) + "\n" for row in module.rows(count, seed=seed))
        (output / "rows" / f"{split}.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    main()
