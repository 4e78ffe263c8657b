"""
Parts of a step on one GPU, each by several ways: the LM head's log-probs, attention over packed rows, generation.

    python -m benchmarks.gpu_parts [--device cpu] [--parts head attention generation]

Prints a line of JSON for each way: milliseconds (the median of five, after two to warm up) and the peak of memory
above what was there before. Shapes are those of gpu.py's rows of 1.5B.
"""
# ruff: noqa: B023, for each function is run before the loop goes on

import argparse
import json
import multiprocessing
import statistics
import time

import torch

from .gpu_row import COMPLETION, EOS, LORA, MICRO, PAD, PROMPT, ROWS, build, without


def timed(run, is_cuda, repeats=5, warm=2):
    """(milliseconds, peak GiB) of a call."""
    seconds = []
    if is_cuda:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
    for i in range(warm + repeats):
        if is_cuda:
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        run()
        if is_cuda:
            torch.cuda.synchronize()
        if i >= warm:
            seconds.append(time.perf_counter() - start)
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30 if is_cuda else 0.0
    return {"ms": round(1000 * statistics.median(seconds), 2), "GiB": round(peak, 2)}


def lengths_of(rows, longest, generator):
    return (torch.rand(rows, generator=generator).square() * longest).long().clamp(1).tolist()


def show(part, way, run):
    try:
        print(json.dumps({"part": part, "way": way, **run()}), flush=True)
    except Exception as error:
        lines = f"{type(error).__name__}: {error}"
        print(json.dumps({"part": part, "way": way, "error": lines[:300]}), flush=True)


# ---- Log-probs and entropies of N tokens from states ----


def head(device, is_cuda):
    from trl.trainer.utils import selective_log_softmax_and_entropy

    from trl_ext.functional import logprobs_and_entropies

    hidden, vocabulary = (1536, 151_936) if is_cuda else (64, 500)
    dtype = torch.bfloat16 if is_cuda else torch.float32
    for tokens in (MICRO * COMPLETION, ROWS * COMPLETION // 4) if is_cuda else (64,):
        states = torch.randn(tokens, hidden, device=device, dtype=dtype, requires_grad=True)
        weight = (0.02 * torch.randn(vocabulary, hidden, device=device)).to(dtype)
        labels = torch.randint(vocabulary, (tokens,), device=device)

        def ours():
            logprobs, _ = logprobs_and_entropies(states @ weight.t(), labels)
            logprobs.sum().backward()

        def kernel():
            logprobs, _ = selective_log_softmax_and_entropy(states @ weight.t(), labels, entropy_requires_grad=False)
            logprobs.sum().backward()

        def product():
            logits = states @ weight.t()
            logits.backward(logits)

        def forward(way):
            with torch.no_grad():
                way(states @ weight.t(), labels)

        size = f"{tokens} tokens"
        show(f"head, {size}", "ours in place, forward and backward", lambda: timed(ours, is_cuda))
        show(f"head, {size}", "TRL's kernel, forward and backward", lambda: timed(kernel, is_cuda))
        show(f"head, {size}", "products alone, forward and backward", lambda: timed(product, is_cuda))
        for name, way in (("ours", logprobs_and_entropies), ("TRL's kernel", selective_log_softmax_and_entropy)):
            show(f"head, {size}", f"{name}, forward", lambda way=way: timed(lambda: forward(way), is_cuda))

        def same():
            a = logprobs_and_entropies((states @ weight.t()).detach(), labels)
            b = selective_log_softmax_and_entropy((states @ weight.t()).detach(), labels)
            return {
                f"{n} differ by": (x - y).abs().max().item() for n, x, y in zip(("log-probs", "H"), a, b, strict=True)
            }

        show(f"head, {size}", "ours and the kernel", same)


# ---- Attention over rows of different lengths ----


def attention(device, is_cuda):
    from trl_ext.models.packing import VARLEN, pack, use_varlen

    settings = {"size": "1.5B" if is_cuda else "tiny"}
    model = build(settings, device).requires_grad_(False)
    use_varlen(model)
    without("")  # on torch 2.11 our attention leaves out an argument
    vocabulary, generator = model.config.vocab_size, torch.Generator().manual_seed(0)
    prompt, completion = (PROMPT, COMPLETION) if is_cuda else (8, 8)
    embed = model.get_input_embeddings()
    for rows in (MICRO, 16):
        ids = torch.randint(4, vocabulary, (rows, prompt + completion), generator=generator).to(device)
        for shape in ("varying", "fixed"):
            lengths = lengths_of(rows, completion, generator) if shape == "varying" else [completion] * rows
            pairs = [(prompt, length) for length in lengths]
            mask = torch.zeros_like(ids)
            for row, length in enumerate(lengths):
                mask[row, : prompt + length] = 1
            width = prompt + max(lengths)
            packed = pack(ids, pairs, completion, model.config.hidden_size)
            one = pack(ids, pairs, completion, model.config.hidden_size, with_starts=True)

            def step(inputs, ids):
                embeddings = embed(ids).detach().requires_grad_()
                out = model.model(inputs_embeds=embeddings, use_cache=False, **inputs).last_hidden_state
                out.backward(out.detach())
                return out.detach()

            what = f"backbone 1.5B, {rows} rows {shape}, forward and backward"
            ways = {
                "padded, sdpa": ({"attention_mask": mask[:, :width]}, ids[:, :width], "sdpa"),
                f"packed, sdpa with a 4-D mask {tuple(packed.input_ids.shape)}": (
                    {"position_ids": packed.position_ids},
                    packed.input_ids,
                    "sdpa",
                ),
                "packed, one sequence, sdpa with a 4-D mask": (
                    {"position_ids": one.position_ids},
                    one.input_ids,
                    "sdpa",
                ),
                "packed, torch's varlen": (
                    {"position_ids": one.position_ids, "attention_mask": one.starts},
                    one.input_ids,
                    VARLEN,
                ),
            }
            if is_cuda and rows == 16 and shape == "varying":
                ways["packed, flex"] = ({"position_ids": one.position_ids}, one.input_ids, "flex_attention")
            outs = {}
            for name, (inputs, tokens, way) in ways.items():

                def run(inputs=inputs, tokens=tokens, way=way, name=name):
                    model.set_attn_implementation(way)
                    outs[name] = step(inputs, tokens)
                    found = timed(lambda: step(inputs, tokens), is_cuda, 4, 1)
                    return {**found, "tokens": tokens.numel()}

                show(what, name, run)
            base = outs.get("packed, one sequence, sdpa with a 4-D mask")
            for name in ("packed, torch's varlen", "packed, flex"):
                if base is not None and name in outs:
                    real = one.mask[0].bool()
                    error = (outs[name][0, real] - base[0, real]).float().norm() / base[0, real].float().norm()
                    show(what, f"{name} beside sdpa", lambda error=error: {"relative error": error.item()})


# ---- Generation on the weights that are trained ----


def generation(device, is_cuda):
    from peft import LoraConfig, get_peft_model
    from transformers import ContinuousBatchingConfig, GenerationConfig

    from trl_ext.models.decoding import SamplerRecorder, decode

    model = build({"size": "1.5B" if is_cuda else "tiny"}, device).eval()
    prompt, new = (PROMPT, 128) if is_cuda else (8, 8)
    vocabulary = model.config.vocab_size
    peft = get_peft_model(model, LoraConfig(**LORA))

    def config(new, **more):
        return GenerationConfig(
            max_new_tokens=new, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=PAD, **more
        )

    def inputs(rows):
        ids = torch.randint(4, vocabulary, (rows, prompt), device=device)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def run(rows, call):
        given = inputs(rows)
        model.destroy_cached_continuous_batching_manager()
        with torch.no_grad():
            start = time.perf_counter()
            call(given, 8)
            if is_cuda:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            between = time.perf_counter()
            call(given, new)
            if is_cuda:
                torch.cuda.synchronize()
            seconds = time.perf_counter() - between
        peak = torch.cuda.max_memory_allocated() / 2**30 if is_cuda else 0.0
        return {
            "ms a token": round(1000 * seconds / new, 2),
            "tokens a second": round(rows * new / seconds),
            "warm-up, s": round(between - start, 1),
            "GiB": round(peak, 2),
        }

    def eager(given, new):
        peft.generate(
            **given, generation_config=config(new, disable_compile=True, eos_token_id=EOS, min_new_tokens=new)
        )

    def ours(given, new):
        recorder = SamplerRecorder()
        decode(
            peft,
            recorder,
            generation_config=config(new, disable_compile=True, eos_token_id=EOS, min_new_tokens=new),
            **given,
        )

    def static(given, _):  # the cache has one size, so that it is compiled once
        settings = config(new, eos_token_id=EOS, min_new_tokens=new, cache_implementation="static")
        peft.generate(**given, generation_config=settings)

    def batched(given, _):  # one size, for which the manager is made
        settings = ContinuousBatchingConfig(return_logprobs=True, auto_switch_to_flash=False)
        out = model.generate_batch(
            given["input_ids"].tolist(),
            generation_config=config(new),
            continuous_batching_config=settings,
            persistent_manager=True,  # graphs are captured in the first call
        )
        assert len(out) == len(given["input_ids"]), len(out)
        lengths = {len(one.generated_tokens) for one in out.values()}
        assert lengths == {new}, lengths
        assert all(len(one.logprobs) == new for one in out.values())

    few, many = (64, 256) if is_cuda else (4, 8)
    for rows in (few, many):
        what = f"generation, LoRA, {rows} rows"
        show(what, "generate", lambda rows=rows: run(rows, eager))
        show(what, "generate, static cache, compiled", lambda rows=rows: run(rows, static))
        show(what, "trl_ext's decode", lambda rows=rows: run(rows, ours))
    show(f"generation, LoRA, {few} rows", "generate_batch", lambda: run(few, batched))


PARTS = {"head": head, "attention": attention, "generation": generation}


def start(part, device):
    PARTS[part](torch.device(device), device == "cuda")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--seconds", type=float, default=110, help="for each part, at most")
    args = parser.parse_args()
    import trl  # noqa: F401

    import trl_ext.ppo.trainer  # noqa: F401

    for part in args.parts:
        process = multiprocessing.get_context("fork").Process(target=start, args=(part, args.device))
        process.start()
        process.join(args.seconds)
        if process.is_alive():
            print(json.dumps({"part": part, "error": f"cut after {args.seconds} s"}), flush=True)
            process.kill()
            process.join()


if __name__ == "__main__":
    main()
