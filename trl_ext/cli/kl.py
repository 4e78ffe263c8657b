"""Estimate KL(A ‖ B), the divergence of checkpoint A from checkpoint B, on answers that A samples.

    trl-ext kl A B --prompts prompts.jsonl

A and B are folders or hub names of causal language models, or of PEFT adapters. The prompts are a text file with one
prompt on each line, or a data set with the column `prompt`, which holds text or messages. The maximum length of an
answer and the temperature are those of A's run, if its folder records them. KL is summed over a response, in nats, as
in `objective/kl` and KLBudgetCallback.
"""

if __name__ == "__main__":  # before the libraries that are imported next
    from ..upstream.terminal import quiet

    quiet()

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .model_names import check_model

if TYPE_CHECKING:
    from torch import Tensor


def sampled_kl(
    policy: Any,
    reference: Any,
    tokenizer: Any,
    prompts: list,
    max_new_tokens: int = 128,
    temperature: float = 1.0,
    batch_size: int = 16,
    seed: int = 0,
) -> "tuple[Tensor, Tensor]":
    """
    Estimate KL(policy ‖ reference) by the estimator k1 (Schulman 2020), on one sampled answer to each prompt.

    Args:
        policy, reference: causal language models with the same tokenizer, in evaluation mode. The reference's
            vocabulary must not be smaller than the policy's.
        tokenizer: tokenizer of both models.
        prompts: texts or messages.
        max_new_tokens: maximum length of an answer, in tokens.
        temperature: temperature of sampling, and of the log-probs of both models.
        batch_size: number of prompts that are answered at once.
        seed: seed of sampling, which does not use the global generator.

    Returns:
        Two tensors with a number for each of N answers: (N,) its KL in nats, summed over its tokens, and (N,) how many
        tokens it has, EOS included.
    """
    import torch  # here, as below: `--help` and what was mistyped need not wait for it

    from ..functional import kl_estimate
    from ..models import completion_logprobs, eos_token_ids, prompt_token_ids, sample

    prompt_ids = prompt_token_ids(tokenizer, prompts)
    answers = sample(
        policy,
        prompt_ids,
        eos_token_ids(policy, tokenizer),
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        batch_size=batch_size,
        seed=seed,
    )
    sums = []
    for start in range(0, len(prompts), batch_size):
        batch = slice(start, start + batch_size)
        (logprobs, _), (ref_logprobs, _) = (
            completion_logprobs(model, prompt_ids[batch], answers[batch], temperature) for model in (policy, reference)
        )
        sums.append(kl_estimate(logprobs, ref_logprobs.to(logprobs.device), "k1").sum(1).cpu())  # 0 on padding
    return torch.cat(sums), torch.tensor([len(answer) for answer in answers])


def read_prompts(path: str, split: str = "train") -> list:
    """Return the lines of a .txt file that are not empty, or the column `prompt` of a data set."""
    from ..data import load_dataset_split

    if path.endswith(".txt"):
        return [line for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
    return list(load_dataset_split(path, split)["prompt"])


def sampling_of(folder: str) -> tuple[int, float]:
    """
    Return two settings of the run in `folder`: the maximum length of an answer, and the temperature.

    If the folder does not record them, return 128 tokens and 1.0.
    """
    from ..runs import PRIVATE_FOLDER
    from ..runs.jsonl import read_jsonl

    run = Path(folder).parent if Path(folder).name.startswith("checkpoint-") else Path(folder)
    lines = [path for place in ("", PRIVATE_FOLDER) if (path := run / place / "metrics.rank0.jsonl").is_file()]
    recorded = [row["config"] for path in lines for row in read_jsonl(path) if isinstance(row.get("config"), dict)]
    config = recorded[-1] if recorded else {}
    return config.get("max_completion_length") or 128, config.get("temperature") or 1.0


def _short(value: float) -> float:
    return float(f"{value:.6g}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("trl-ext kl", description="KL(A ‖ B) between two checkpoints.")
    parser.add_argument("a", metavar="A", help="the policy: answers are sampled from it")
    parser.add_argument("b", metavar="B", help="the reference")
    parser.add_argument("--prompts", required=True, help="a .txt file, one a line, or a data set with `prompt`")
    parser.add_argument("--split", default="train", help="of the data set")
    parser.add_argument("--num_prompts", type=int, default=256, help="how many of them, from the first on")
    parser.add_argument("--max_new_tokens", type=int, help="longest answer; by default as in A's run, or 128")
    parser.add_argument("--temperature", type=float, help="of sampling and log-probs; by default as in A's run, or 1")
    parser.add_argument("--batch_size", type=int, default=16, help="prompts at once")
    parser.add_argument("--seed", type=int, default=0, help="of sampling")
    args = parser.parse_args(arguments)
    try:
        longest, temperature = sampling_of(args.a)
        args.max_new_tokens = longest if args.max_new_tokens is None else args.max_new_tokens
        args.temperature = temperature if args.temperature is None else args.temperature
        if args.temperature <= 0 or min(args.num_prompts, args.max_new_tokens, args.batch_size) < 1:
            raise ValueError(
                "--temperature must be above 0, and --num_prompts, --max_new_tokens and --batch_size must be 1 or "
                f"more; got {args.temperature}, {args.num_prompts}, {args.max_new_tokens} and {args.batch_size}"
            )
        from ..upstream.terminal import late_bars

        late_bars()
        prompts = read_prompts(args.prompts, args.split)[: args.num_prompts]
        if not prompts:
            raise ValueError(f"{args.prompts} has no prompts: give a file or data set with rows")
        check_model("A", args.a)
        check_model("B", args.b)
        from ..evaluation import bootstrap_interval
        from ..models import check_same_ids, load_model, load_tokenizer, vocabulary_of

        policy, reference = load_model(args.a), load_model(args.b)
        tokenizer = load_tokenizer(args.a)
        ours, theirs = (vocabulary_of(model) for model in (policy, reference))
        if theirs < ours:
            raise ValueError(
                f"A has a vocabulary of {ours} tokens, B only {theirs}: choose a B that has all tokens of A"
            )
        if theirs > ours:
            check_same_ids("B", args.b, tokenizer)
        kl, tokens = sampled_kl(
            policy, reference, tokenizer, prompts, args.max_new_tokens, args.temperature, args.batch_size, args.seed
        )
    except (ValueError, OSError) as error:
        print(f"{parser.prog}: error: {str(error).splitlines()[0]}", file=sys.stderr)
        sys.exit(2)
    low, high = bootstrap_interval(kl)
    result = {
        "kl": _short(kl.mean().item()),
        "interval_95": [_short(low), _short(high)],
        "kl_per_token": _short((kl.sum() / tokens.sum()).item()),
        "mean_length": _short(tokens.double().mean().item()),
        "prompts": len(prompts),
        "max_new_tokens": args.max_new_tokens,
        "temperature": args.temperature,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
