"""KL(A ‖ B) between two checkpoints, estimated on answers that A samples.

    python -m trl_ext.commands.kl A B --prompts prompts.jsonl

A and B are folders or hub names of causal language models, or of PEFT adapters; prompts are a text file with one a
line, or a data set with the column `prompt`, text or messages. KL is summed over a response, in nats: what
`objective/kl` and KLBudgetCallback count.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from ..evaluation import bootstrap_interval
from ..functional import kl_estimate, position_ids
from ..upstream import is_conversational


@torch.no_grad()
def sampled_kl(
    policy: Any,
    reference: Any,
    tokenizer: Any,
    prompts: list,
    max_new_tokens: int = 128,
    temperature: float = 1.0,
    batch_size: int = 16,
    seed: int = 0,
) -> tuple[Tensor, Tensor]:
    """
    Estimate KL(policy ‖ reference) on one sampled answer to each prompt, k1 (Schulman 2020).

    Args:
        policy, reference: causal language models with one vocabulary.
        tokenizer: theirs.
        prompts: texts or messages.
        max_new_tokens: longest answer.
        temperature: of sampling and of both log-probs.
        batch_size: prompts at once.
        seed: of sampling; the global generator is left alone.

    Returns:
        (N,) nats summed over each answer, and (N,) its tokens, EOS included.
    """
    sums, lengths = [], []
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for start in range(0, len(prompts), batch_size):
            total, length = _batch(
                policy, reference, tokenizer, prompts[start : start + batch_size], max_new_tokens, temperature
            )
            sums.append(total)
            lengths.append(length)
    return torch.cat(sums), torch.cat(lengths)


def _batch(
    policy, reference, tokenizer, prompts: list, max_new_tokens: int, temperature: float
) -> tuple[Tensor, Tensor]:
    if is_conversational({"prompt": prompts[0]}):
        ids = tokenizer.apply_chat_template(prompts, add_generation_prompt=True, tokenize=True, return_dict=True)
        encoded = {"input_ids": ids["input_ids"]}
    else:
        encoded = {"input_ids": tokenizer(prompts)["input_ids"]}
    asked = tokenizer.pad(encoded, padding_side="left", return_tensors="pt").to(policy.device)
    eos = tokenizer.eos_token_id
    sequences = policy.generate(
        input_ids=asked["input_ids"],
        attention_mask=asked["attention_mask"],
        max_new_tokens=max_new_tokens,
        do_sample=True,
        temperature=temperature,
        top_k=0,
        top_p=1.0,
        eos_token_id=eos,
        pad_token_id=tokenizer.pad_token_id,
    )
    start = asked["input_ids"].shape[1]
    answers = sequences[:, start:]
    mask = (answers == eos).cumsum(1) - (answers == eos).long() == 0  # up to the first EOS, that included
    attention = torch.cat([asked["attention_mask"], mask.long()], dim=1)
    logprobs, ref_logprobs = (
        _logprobs(model, sequences, attention, start, temperature) for model in (policy, reference)
    )
    kl = torch.where(mask, kl_estimate(logprobs, ref_logprobs, "k1"), 0.0)
    return kl.sum(1).cpu(), mask.sum(1).cpu()


def _logprobs(model, sequences: Tensor, attention: Tensor, start: int, temperature: float) -> Tensor:
    logits = model(
        input_ids=sequences.to(model.device),
        attention_mask=attention.to(model.device),
        position_ids=position_ids(attention).to(model.device),
    ).logits[:, start - 1 : -1]
    logprobs = (logits.float() / temperature).log_softmax(-1)
    return logprobs.gather(-1, sequences[:, start:, None].to(logprobs.device))[..., 0].to(sequences.device)


def read_prompts(path: str, split: str = "train") -> list:
    """Prompts of a text file, one a line, or of a data set."""
    from ..data import load_dataset_split

    if path.endswith(".txt"):
        return [line for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
    return list(load_dataset_split(path, split)["prompt"])


def load_model(name: str) -> Any:
    """A causal language model, also one that is an adapter, in evaluation mode."""
    if (Path(name) / "adapter_config.json").is_file():
        from peft import AutoPeftModelForCausalLM

        model = AutoPeftModelForCausalLM.from_pretrained(name)
    else:
        model = AutoModelForCausalLM.from_pretrained(name)
    return model.eval().to("cuda" if torch.cuda.is_available() else "cpu")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m trl_ext.commands.kl", description="KL(A ‖ B) between two checkpoints.")
    parser.add_argument("a", metavar="A", help="the policy: answers are sampled from it")
    parser.add_argument("b", metavar="B", help="the reference")
    parser.add_argument("--prompts", required=True, help="a .txt file, one a line, or a data set with `prompt`")
    parser.add_argument("--split", default="train", help="of the data set")
    parser.add_argument("--num_prompts", type=int, default=256, help="how many of them, from the first on")
    parser.add_argument("--max_new_tokens", type=int, default=128, help="longest answer")
    parser.add_argument("--temperature", type=float, default=1.0, help="of sampling and log-probs")
    parser.add_argument("--batch_size", type=int, default=16, help="prompts at once")
    parser.add_argument("--seed", type=int, default=0, help="of sampling")
    args = parser.parse_args(arguments)
    try:
        if args.temperature <= 0 or min(args.num_prompts, args.max_new_tokens, args.batch_size) < 1:
            raise ValueError("--temperature must be above 0, --num_prompts, --max_new_tokens, --batch_size 1 or more")
        prompts = read_prompts(args.prompts, args.split)[: args.num_prompts]
        if not prompts:
            raise ValueError(f"{args.prompts} has no prompts")
        policy, reference = load_model(args.a), load_model(args.b)
        tokenizer = AutoTokenizer.from_pretrained(args.a)
        vocabularies = [model.config.get_text_config().vocab_size for model in (policy, reference)]
        if vocabularies[0] != vocabularies[1]:
            raise ValueError(f"A has a vocabulary of {vocabularies[0]} tokens, B one of {vocabularies[1]}")
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
    except (ValueError, OSError) as error:
        print(f"{parser.prog}: error: {str(error).splitlines()[0]}", file=sys.stderr)
        sys.exit(2)
    kl, tokens = sampled_kl(
        policy, reference, tokenizer, prompts, args.max_new_tokens, args.temperature, args.batch_size, args.seed
    )
    low, high = bootstrap_interval(kl)
    result = {
        "kl": kl.mean().item(),
        "interval_95": [low, high],
        "kl_per_token": (kl.sum() / tokens.sum()).item(),
        "mean_length": tokens.double().mean().item(),
        "prompts": len(prompts),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
