"""Answer prompts with a saved policy: read a dataset's column `prompt`, or one `--prompt`; write JSON lines.

    trl-ext generate --model_name_or_path PATH_OR_HUB_NAME --dataset_name DATA --output_file PATH

The policy is the folder or hub name of a model or an adapter. Each line has `prompt`, `completion` (text or messages,
as the prompt is) and `finished`: true if the answer ended by EOS, false if it was cut at `max_new_tokens`. With
`--rollouts true` it also has `prompt_ids` and `completion_ids`, the sampled tokens, EOS included, and the dataset's
other columns, which reward functions may need; `trl-ext pretrain-critic` reads such files. Prompts that are messages
go through the tokenizer's chat template. The sampled answers depend on `seed` and `batch_size`, not on the number of
processes. A single `--prompt` is answered on the terminal if there is no `output_file`.
"""

import json
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from trl_ext import StrictTrlParser
from trl_ext.runs import check_output_dir, check_settings, setting
from trl_ext.upstream import quiet

WRITTEN = ("prompt", "completion", "finished", "prompt_ids", "completion_ids")  # of a line, by this script


@dataclass
class GenerateArguments:
    """Declare the arguments of `trl-ext generate`: the policy, the prompts, and how answers are sampled."""

    model_name_or_path: str = field(metadata={"help": "Policy: folder or hub name of a model or an adapter."})
    prompt: str | None = setting(None, "One prompt, in place of a dataset.")
    dataset_name: str | None = setting(
        None, "Dataset with the column `prompt`: a hub name, a .jsonl file or a folder."
    )
    dataset_config: str | None = setting(None, "Configuration of a hub dataset.")
    dataset_split: str | None = setting(None, "Split of the dataset; if unset, `train` of a single file, else `test`.")
    max_prompts: int | None = setting(
        None, "Number of prompts to answer, from the first on; all if unset.", range=">= 1"
    )
    output_file: str | None = setting(None, "File for the answers, in JSON lines; it must not exist.")
    num_samples: int = setting(1, "Number of answers to each prompt.", range=">= 1")
    rollouts: bool = setting(
        False, "Also write the token ids and the dataset's other columns, for `trl-ext pretrain-critic`."
    )
    chat: bool = setting(False, "Treat a text prompt as a user's message.")
    batch_size: int = setting(16, "Number of prompts in one batch of one process.", range=">= 1")
    temperature: float = setting(1.0, "Temperature of the sampling; 0 always takes the likeliest token.", range=">= 0")
    top_p: float = setting(
        1.0, "Sample only from the likeliest tokens with this total probability (top-p).", range="in (0, 1]"
    )
    max_new_tokens: int | None = setting(
        None,
        "Tokens after which an answer is cut off; if unset 256, or fewer if the model's context has less room.",
        range=">= 1",
    )
    seed: int = setting(0, "Seed of the sampling.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto", "dtype of the weights; `auto` keeps the saved one."
    )
    revision: str = setting("main", "Branch, tag or commit of a hub model.")
    use_cpu: bool = setting(False, "Do not use a GPU, even if there is one.")

    def __post_init__(self):
        check_settings(self)
        if (self.prompt is None) == (self.dataset_name is None):
            raise ValueError(f"give either `dataset_name` or `prompt`, got {self.dataset_name!r} and {self.prompt!r}")
        if self.dataset_name and not self.output_file:
            raise ValueError("no `output_file`: name a file for the answers, such as answers.jsonl")
        if self.output_file and Path(self.output_file).exists():
            raise ValueError(f"`output_file` {self.output_file} exists: choose another path")


def load_prompts(args: GenerateArguments) -> tuple[list[Any], list[dict]]:
    """Return the prompts, each `num_samples` times, and as often its row's columns to keep ({} without `rollouts`)."""
    from trl_ext import load_dataset_split
    from trl_ext.data import check_texts

    kept: list[dict] = []
    if args.prompt is not None:
        prompts: list[Any] = [args.prompt]
    else:
        assert args.dataset_name is not None
        split = args.dataset_split or ("train" if Path(args.dataset_name).is_file() else "test")
        dataset = load_dataset_split(args.dataset_name, split, config=args.dataset_config)
        dataset = dataset.select(range(min(len(dataset), args.max_prompts or len(dataset))))
        check_texts(dataset, ("prompt",), f"dataset {args.dataset_name!r}", may_be_empty=False)
        prompts = dataset["prompt"][:]
        if args.rollouts:
            others = [name for name in dataset.column_names if name not in WRITTEN]
            kept = dataset.select_columns(others).to_list() if others else []
    if args.chat:
        prompts = [[{"role": "user", "content": p}] if isinstance(p, str) else p for p in prompts]
    each = range(args.num_samples)
    return [prompt for prompt in prompts for _ in each], [row for row in kept or [{}] * len(prompts) for _ in each]


def main(arguments: list[str] | None = None) -> None:
    # 1. Set-up
    quiet()
    parser = StrictTrlParser(GenerateArguments, without_arguments=__doc__)
    (args,) = parser.parse_args_and_config(arguments)
    with parser.one_line_errors():
        if args.output_file:
            check_output_dir(Path(args.output_file).parent, "false")
        prompts, columns = load_prompts(args)

    # These take seconds to import: what was mistyped has been refused by now
    import torch
    from accelerate import PartialState
    from accelerate.utils import gather_object
    from tqdm.auto import tqdm

    from trl_ext.models import (
        answer_texts,
        context_of,
        eos_token_ids,
        load_model,
        load_tokenizer,
        prompt_token_ids,
        sample,
    )

    # Without a GPU and `cpu`, each of several processes would take itself for the only one, and write the file
    state = PartialState(cpu=args.use_cpu or not torch.accelerator.is_available() or None)

    # 2. Model
    with parser.one_line_errors():
        tokenizer = load_tokenizer(args.model_name_or_path, args.revision)
        prompt_ids = prompt_token_ids(tokenizer, prompts)
        model = load_model(args.model_name_or_path, state.device, args.revision, args.dtype)
    context = context_of(model)
    longest = max(map(len, prompt_ids))
    room = context - longest
    longest_answer = args.max_new_tokens or max(min(256, room), 1)
    if longest_answer > room:
        parser.error(
            f"the longest prompt has {longest} tokens and `max_new_tokens` is {longest_answer}, but the model's "
            f"context has only {context}: lower `max_new_tokens`, or shorten the prompts"
        )

    # 3. Generate: batch after batch, one to each process, written as they come
    ends = eos_token_ids(model, tokenizer)
    starts = range(0, len(prompts), args.batch_size)
    done = finished = 0
    state.wait_for_everyone()  # until all have seen that there is no such file yet
    partial = Path(f"{args.output_file}.partial")  # so that what was interrupted is not taken for whole
    if args.output_file and state.is_main_process:
        partial.parent.mkdir(parents=True, exist_ok=True)
    with open(partial, "w") if args.output_file and state.is_main_process else nullcontext() as file:
        rounds = range(0, len(starts), state.num_processes)
        hidden = None if state.is_main_process else True  # None: tqdm hides the bar where there is no terminal
        for first in tqdm(rounds, "Answering", leave=False, disable=hidden):
            mine = starts[first + state.process_index :][:1]
            rows: list[dict] = []
            for start in mine:
                batch = slice(start, start + args.batch_size)
                answers = sample(
                    model,
                    prompt_ids[batch],
                    ends,
                    max_new_tokens=longest_answer,
                    temperature=args.temperature,
                    top_p=args.top_p,
                    seed=args.seed * 1_000_003 + start,
                )
                texts = answer_texts(tokenizer, answers, ends)
                drawn = zip(prompts[batch], prompt_ids[batch], answers, texts, columns[batch], strict=True)
                for prompt, asked, ids, text, others in drawn:
                    completion = text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
                    row = {"prompt": prompt, "completion": completion, "finished": ids[-1] in ends}
                    tokens = {"prompt_ids": asked, "completion_ids": ids} if args.rollouts else {}
                    rows.append({**row, **tokens, **others})
            rows = gather_object(rows) if state.num_processes > 1 else rows
            done = done + len(rows)
            finished = finished + sum(row["finished"] for row in rows)
            if file is not None:
                file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
                file.flush()
            elif mine and not args.output_file:
                print("\n".join(texts))
    if args.output_file:
        if state.is_main_process:
            partial.rename(args.output_file)
        state.wait_for_everyone()  # who goes on finds the file
        state.print(f"Answers: {args.output_file}, {done}; {finished} ended by EOS")


if __name__ == "__main__":
    main()
