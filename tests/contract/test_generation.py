"""Generation by transformers and by vLLM."""

import ast
import inspect
import textwrap

import torch
from transformers import GenerationConfig
from transformers.generation import LogitsProcessor
from trl.generation.vllm_generation import VLLMGeneration

from tests.contract.observed import require
from tests.tiny import tiny_llama


def test_generate_builds_its_processors_with_the_warpers_last():
    """`SamplerRecorder` is appended to what `_get_logits_processor` returns, and must see what is drawn from."""

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
    reader = "`SamplerRecorder`"
    require(len(calls) == 1, f"`_get_logits_processor` is called {len(calls)} times a `generate`", reader)
    require(len(last.scores) == ids.size(1) - 2, f"a processor is called {len(last.scores)} times", reader)
    require(
        all(s.isfinite().sum() == 3 for s in last.scores), "an appended processor is not the last, after top-k", reader
    )
    require(all(s.isfinite().all() for s in custom.scores), "a custom processor no longer comes first", reader)


def test_open_fields_of_a_generation_config_are_filled_from_the_models():
    """Why `ActorCritic.generate` hides the model's: a checkpoint's `min_p` would make the sampler another policy."""
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
    """Greedy evaluation and `stop_token_id` change them after it was built. (vLLM itself is not needed here.)"""
    (cls,) = ast.parse(textwrap.dedent(inspect.getsource(VLLMGeneration))).body
    generate = next(node for node in cls.body if getattr(node, "name", None) == "generate")
    read = {ast.unparse(node) for node in ast.walk(generate) if isinstance(node, ast.Attribute)}
    for name in ("self.temperature", "self.generation_kwargs"):
        require(name in read, f"`VLLMGeneration.generate` does not read `{name}`")
