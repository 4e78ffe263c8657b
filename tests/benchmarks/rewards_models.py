"""What reward models cost: several adapters on one base, half precision, and batches by a budget of tokens.

    python tests/benchmarks/rewards_models.py

Prints three Markdown tables. The models are made of a configuration, with random weights: bytes and times are those of
trained ones of that size, errors of half precision only tell the order of magnitude.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForSequenceClassification, LlamaConfig, PreTrainedTokenizerFast

from trl_ext.rewards import EnsembleReward, ModelReward

WORDS = 4000


def make_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {token: i for i, token in enumerate(["<pad>", "</s>", *(f"w{i}" for i in range(WORDS))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>")


def make_model(width: int, layers: int, seed: int) -> Any:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=WORDS + 2,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=1024,
        pad_token_id=0,
        num_labels=1,
    )
    return AutoModelForSequenceClassification.from_config(config)


def make_adapter(base: Path, folder: Path, seed: int) -> str:
    torch.manual_seed(seed)
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    model = get_peft_model(model, LoraConfig(r=8, task_type="SEQ_CLS", target_modules="all-linear"))
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.02)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)


def make_rows(n: int, shortest: int, longest: int) -> tuple[list[str], list[str]]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(shortest, longest + 1, (n,), generator=generator).tolist()
    words = [torch.randint(WORDS, (length,), generator=generator).tolist() for length in lengths]
    return ["w0 w1 "] * n, [" ".join(f"w{i}" for i in row) for row in words]


def seconds(score: Callable[[], Any], repeats: int) -> float:
    """The least processor time of some calls: beside other work the clock would tell of that."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        score()
        times.append(time.process_time() - start)
    return min(times)


def megabytes(rewards: list[ModelReward]) -> float:
    """Weights that are there, each once."""
    return sum({p.data_ptr(): p.nbytes for reward in rewards for p in reward.model.parameters()}.values()) / 2**20


def rank_correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    ranks = torch.stack([x.argsort().argsort().double() for x in (a, b)])
    return ranks.corrcoef()[0, 1].item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    tokenizer = make_tokenizer()
    for i in range(4):
        make_model(args.width, args.layers, i).save_pretrained(folder / f"full-{i}")
        tokenizer.save_pretrained(folder / f"full-{i}")
    full = [str(folder / f"full-{i}") for i in range(4)]
    lora = [make_adapter(Path(full[0]), folder / f"lora-{i}", i) for i in range(4)]
    prompts, answers = make_rows(args.rows, 8, 256)
    ended = [True] * args.rows

    def score(reward: Callable) -> list[float]:
        return reward(prompts, answers, finished=ended)

    size = sum(p.numel() for p in ModelReward(full[0]).model.parameters()) / 1e6
    print(
        f"\nA Llama of {size:.0f} M parameters, {args.rows} answers of 8 to 256 tokens, float32, "
        f"{torch.get_num_threads()} thread(s), torch {torch.__version__}\n"
    )

    print("| 4 members | weights, MiB | loading, CPU s | scoring, CPU s |\n|---|---|---|---|")
    for name, paths in (("full models", full), ("adapters of rank 8 on one base", lora)):
        start = time.process_time()
        ensemble = EnsembleReward(paths)
        loading = time.process_time() - start
        rewards = [member.function for member in ensemble.members]
        taken = seconds(lambda ensemble=ensemble: score(ensemble), args.repeats)
        print(f"| {name} | {megabytes(rewards):.0f} | {loading:.2f} | {taken:.2f} |", flush=True)
    one = ModelReward(full[0])
    print(f"| (one full model) | {megabytes([one]):.0f} | | {seconds(lambda: score(one), args.repeats):.2f} |")

    print("\n| dtype | rank correlation with float32 | largest error | in standard deviations of the scores |")
    print("|---|---|---|---|")
    exact = torch.tensor(score(one))
    for dtype in ("bfloat16", "float16"):
        half = torch.tensor(score(ModelReward(full[0], dtype=dtype)))
        error = (half - exact).abs().max().item()
        print(
            f"| {dtype} | {rank_correlation(half, exact):.4f} | {error:.4f} | {error / exact.std().item():.3f} |",
            flush=True,
        )

    print("\n| forwards | answers a CPU second |\n|---|---|")
    bounds: list[tuple[str, dict]] = [("one by one", {"batch_size": 1})]
    bounds += [(f"of at most {n:,} tokens, padding included", {"max_batch_tokens": n}) for n in (1024, 4096, 16384)]
    bounds += [(f"of {n} rows of like length", {"max_batch_tokens": None, "batch_size": n}) for n in (8, 32)]
    for name, kwargs in bounds:
        reward = ModelReward(full[0], **kwargs)
        taken = seconds(lambda reward=reward: score(reward), args.repeats)
        print(f"| {name} | {args.rows / taken:.1f} |", flush=True)


if __name__ == "__main__":
    main()
