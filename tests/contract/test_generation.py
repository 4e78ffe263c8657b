"""Generation by transformers and by vLLM."""

import ast
import inspect
import textwrap

import torch
from transformers import DynamicCache, GenerationConfig
from transformers.generation import LogitsProcessor
from trl.generation.vllm_generation import VLLMGeneration

from tests.contract.observed import require
from tests.tiny import tiny_llama


def test_generate_builds_its_processors_with_the_warpers_last():
    """`TokenSampler` is appended to what `_get_logits_processor` returns, and must get the sampler's scores."""

    class Record(LogitsProcessor):
        def __init__(self):
            self.scores = []

        def __call__(self, input_ids, scores):
            self.scores.append(scores.clone())
            return scores

    model, last, custom = tiny_llama().eval(), Record(), Record()
    build, calls = model._get_logits_processor, []

    def with_record(*args, **kwargs):
        calls.append(kwargs)
        processors = build(*args, **kwargs)
        processors.append(last)
        return processors

    model._get_logits_processor = with_record
    config = GenerationConfig(do_sample=True, top_k=3, temperature=0.5, max_new_tokens=4, pad_token_id=0)
    ids = model.generate(torch.tensor([[5, 6]]), generation_config=config, logits_processor=[custom])
    reader = "`TokenSampler`"
    require(len(calls) == 1, f"`_get_logits_processor` is called {len(calls)} times a `generate`", reader)
    require(len(last.scores) == ids.size(1) - 2, f"a processor is called {len(last.scores)} times", reader)
    require(
        all(s.isfinite().sum() == 3 for s in last.scores), "an appended processor is not the last, after top-k", reader
    )
    require(all(s.isfinite().all() for s in custom.scores), "a custom processor no longer comes first", reader)


def test_generate_takes_the_largest_score_if_a_hook_says_so():
    """`TokenSampler` samples, sets the score of its token to inf, and clears `do_sample` of `generate`'s copy."""
    model, config = tiny_llama().eval(), GenerationConfig(do_sample=True, max_new_tokens=4, pad_token_id=0)
    build = model._get_logits_processor

    class Seven(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return scores.index_fill_(1, torch.tensor([7]), torch.inf)

    def with_seven(generation_config, *args, **kwargs):
        processors = build(generation_config, *args, **kwargs)
        processors.append(Seven())
        generation_config.do_sample = False
        return processors

    model._get_logits_processor, state = with_seven, torch.get_rng_state()
    ids = model.generate(torch.tensor([[5, 6]]), generation_config=config)
    reader = "`TokenSampler`"
    require(ids[0, 2:].tolist() == [7] * 4, "`do_sample` is read before the processors are built", reader)
    require(torch.equal(torch.get_rng_state(), state), "`generate` draws though `do_sample` was cleared", reader)
    require(config.do_sample, "`generate` gives the hook the caller's config, no copy of it", reader)


def test_generate_continues_from_a_cache_of_all_but_the_last_token():
    """So `decode` may drop rows between two calls: a call gets all ids so far, and reads only the last one."""
    model, seen = tiny_llama().eval(), []
    model.model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    ids, mask = torch.tensor([[0, 5, 6], [7, 8, 9], [5, 6, 7]]), torch.tensor([[0, 1, 1], [1, 1, 1], [1, 1, 1]])
    whole = model.generate(ids, attention_mask=mask, generation_config=greedy(6))
    cache = DynamicCache(config=model.config)
    begun = model.generate(ids, attention_mask=mask, generation_config=greedy(2), past_key_values=cache)
    reader = "`decode`"
    require(cache.get_seq_length() == 4, "a cache that is passed does not hold all tokens but the last", reader)
    cache.batch_select_indices(torch.tensor([0, 2]))
    mask = torch.cat([mask, torch.ones(3, 2, dtype=torch.long)], 1)[[0, 2]]
    seen.clear()
    ended = model.generate(begun[[0, 2]], attention_mask=mask, generation_config=greedy(4), past_key_values=cache)
    require(seen == [(2, 1)] * 4, f"a call that continues reads {seen}", reader)
    require(torch.equal(ended, whole[[0, 2]]), "two calls do not answer as one does", reader)


def greedy(tokens):
    return GenerationConfig(do_sample=False, max_new_tokens=tokens, pad_token_id=0)


def test_open_fields_of_a_generation_config_are_filled_from_the_models():
    """So `ActorCritic.generate` hides the model's: with a checkpoint's `min_p` the sampler would be another policy."""
    model = tiny_llama().eval()
    model.generation_config.suppress_tokens = [i for i in range(29) if i != 7]
    config = GenerationConfig(do_sample=True, max_new_tokens=3, pad_token_id=0)
    reader = "`ActorCritic.generate`"
    filled = model.generate(torch.tensor([[5, 6]]), generation_config=config)
    require(filled[0, 2:].tolist() == [7] * 3, "a field that is None is no longer filled from the model", reader)
    model.generation_config = GenerationConfig()
    torch.manual_seed(0)
    hidden = model.generate(torch.tensor([[5, 6]] * 8), generation_config=config)
    require((hidden[:, 2:] != 7).any(), "`generation_config` of the model is not where it is filled from", reader)


def test_vllm_weights_are_merged_by_two_calls():
    source = inspect.getsource(VLLMGeneration._iter_named_params)
    for call in ("model.merge_adapter()", "model.unmerge_adapter()", "model.prefix in name"):
        require(source.count(call) == 1, f"`_iter_named_params` has no `{call}`", "`AdapterSwitch`, for vLLM,")


def test_vllm_reads_its_settings_when_it_generates():
    """`stop_token_id` changes them after it was built. (vLLM itself is not needed here.)"""
    (cls,) = ast.parse(textwrap.dedent(inspect.getsource(VLLMGeneration))).body
    generate = next(node for node in cls.body if getattr(node, "name", None) == "generate")
    read = {ast.unparse(node) for node in ast.walk(generate) if isinstance(node, ast.Attribute)}
    require("self.generation_kwargs" in read, "`VLLMGeneration.generate` does not read `self.generation_kwargs`")
