"""From which size on a model no longer fits: the table of docs/advise.md, for GPUs with 80 GB.

    python -m tests.benchmarks.advice

No weights are loaded; it takes some minutes of one core.
"""

from transformers import LlamaConfig

from tests.recipes.real_models import LLAMA
from trl_ext.workbench.planning import GPUS, fit

# Llama-3.1's shapes for 8B and 70B, Qwen2.5's for 32B without its biases
SIZES = {
    "8B": LLAMA,
    "32B": LLAMA
    | {"hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40}
    | {"vocab_size": 152064},
    "70B": LLAMA
    | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
}
RUNS = (("8B", True, 1), *((size, lora, 8) for lora in (True, False) for size in SIZES))


def main() -> None:
    h100 = next(gpu for gpu in GPUS if gpu.name == "H100")
    print("| model | trained | GPUs | GiB of each | 80 GB | peak in | GPU-hours |")
    print("|---|---|---|---|---|---|---|")
    for size, lora, gpus in RUNS:
        found = fit("ppo", LlamaConfig(architectures=["LlamaForCausalLM"], **SIZES[size]), h100, gpus, lora=lora)
        cells = (size, "LoRA" if lora else "all weights", gpus, f"{found.peak:.1f}", "yes" if found.fits else "no")
        print("|", " | ".join(map(str, (*cells, f"`{found.phase}`", f"{found.gpu_hours:.1f}"))), "|", flush=True)


if __name__ == "__main__":
    main()
