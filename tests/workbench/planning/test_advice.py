"""What is advised, by a decision table; that it is monotone; that each sentence has a figure and a source."""

import re
from dataclasses import replace
from itertools import product

import pytest
from transformers import LlamaConfig

from tests.test_docs import PAGES, anchors, table
from trl_ext.workbench.planning import GPUS, Facts, Fit, Leak, advise, fit
from trl_ext.workbench.planning.advice import ACCURACY, AGREEMENT, DEMONSTRATIONS, PAIRS, PLANNED, PROMPTS, TITLES

FITS = Fit("ppo", True, 8 * 10**9, "H100", 8, 80, 21.0, "generate", 2.0, 10_000)
TOO_LARGE = replace(FITS, parameters=70 * 10**9, peak=158.0)
GOOD = Facts(
    pairs=5_000, prompts=5_000, agreement=0.75, accuracy=0.7, accuracy_low=0.66, passed=True, verifiable=False
)


@pytest.mark.parametrize(
    "facts, expected",
    [
        (Facts(), "label-more"),
        (Facts(verifiable=True), "ppo"),
        (Facts(verifiable=True, agreement=0.4, prompts=PROMPTS), "ppo"),  # no label is needed
        (Facts(verifiable=True, prompts=PROMPTS - 1), "label-more"),
        (Facts(demonstrations=DEMONSTRATIONS), "sft"),
        (Facts(demonstrations=DEMONSTRATIONS - 1), "label-more"),
        (Facts(demonstrations=DEMONSTRATIONS, pairs=PAIRS - 1), "sft"),
        (Facts(demonstrations=DEMONSTRATIONS, pairs=PAIRS), "dpo"),
        (Facts(demonstrations=DEMONSTRATIONS, pairs=PAIRS, agreement=AGREEMENT - 0.01), "label-more"),
        (Facts(pairs=PAIRS - 1), "label-more"),
        (GOOD, "ppo"),
        (replace(GOOD, agreement=AGREEMENT), "ppo"),
        (replace(GOOD, agreement=AGREEMENT - 0.001), "label-more"),
        (replace(GOOD, accuracy=0.54, accuracy_low=0.5), "label-more"),  # a coin, for all that is known
        (replace(GOOD, accuracy=0.54, accuracy_low=0.51), "online-dpo"),
        (replace(GOOD, accuracy=ACCURACY - 0.001), "online-dpo"),
        (replace(GOOD, passed=None), "online-dpo"),
        (replace(GOOD, passed=False, complaints=("a phrase",)), "dpo"),
        (replace(GOOD, accuracy=None, accuracy_low=None, passed=None), "dpo"),
        (replace(GOOD, prompts=PROMPTS - 1), "dpo"),
        (replace(GOOD, prompts=None), "ppo"),
        (replace(GOOD, ppo=FITS, ppo_full=TOO_LARGE, gpu_hours=16), "ppo"),
        (replace(GOOD, ppo=FITS, ppo_full=TOO_LARGE, gpu_hours=15), "dpo"),
        (replace(GOOD, ppo=TOO_LARGE, ppo_full=TOO_LARGE), "dpo"),
    ],
)
def test_decision_table(facts, expected):
    assert advise(facts).method == expected


VALUES = {
    "demonstrations": (None, DEMONSTRATIONS),
    "pairs": (None, PAIRS - 1, PAIRS),
    "prompts": (PROMPTS - 1, PROMPTS),
    "verifiable": (None, True),
    "agreement": (None, 0.5, AGREEMENT),
    "passed": (None, False, True),
    "ppo": (None, TOO_LARGE, FITS),
}
ACCURACIES = ((None, None), (0.5, 0.4), (0.6, 0.55), (ACCURACY, 0.6))


def all_facts():
    for values, (accuracy, low) in product(product(*VALUES.values()), ACCURACIES):
        facts = Facts(**dict(zip(VALUES, values, strict=True)), accuracy=accuracy, accuracy_low=low)
        extra = {"complaints": ("a phrase",)} if facts.passed is False else {}
        yield replace(facts, **extra, ppo_full=facts.ppo and TOO_LARGE)


def test_more_agreement_pairs_or_accuracy_never_leads_from_training_to_labelling():
    methods = {facts: advise(facts).method for facts in all_facts()}
    assert {*methods.values()} == {*TITLES}  # each can be had
    ranks = ("label-more", "sft", "dpo", "online-dpo", "ppo")
    for facts, method in methods.items():
        better = [
            replace(facts, **{name: value})
            for name in ("pairs", "agreement")
            for value in VALUES[name]
            if value is not None and getattr(facts, name) is not None and value > getattr(facts, name)
        ]
        better += [
            replace(facts, accuracy=accuracy, accuracy_low=low)
            for accuracy, low in ACCURACIES
            if accuracy is not None and facts.accuracy is not None and accuracy > facts.accuracy
        ]
        for other in better:
            assert ranks.index(methods[other]) >= ranks.index(method), (facts, other)


@pytest.mark.slow
def test_each_sentence_has_a_figure_and_a_source_that_exists():
    told = set()
    leaks = (Leak("eval", 3, 10), Leak("test", 0, 10))
    for known in all_facts():
        for facts in (known, replace(known, leaks=leaks, labels=3_000, labels_per_item=3.0, gpu_hours=1.0)):
            found = advise(facts)
            told |= {*found.reasons, *found.cautions, *found.changes, *found.leave}
            assert len(found.reasons) > 1 and (found.leaves is None) == (facts.ppo is None)
    told |= {*advise(replace(GOOD, ppo=FITS, ppo_full=FITS)).leave}
    told |= {*advise(replace(GOOD, ppo=replace(FITS, gpus=16), ppo_full=FITS)).leave}
    assert len(told) > 40
    for sentence, source in told:
        assert re.search(r"\d", sentence) and "None" not in sentence, sentence
        page, _, anchor = source.partition("#")
        if page in PAGES:
            assert anchor in anchors(PAGES[page]), source
        else:
            assert re.fullmatch(r"arXiv:\d{4}\.\d{5}|https://[\w.-]+\.\w+(/[\w.-]+)*", source), source


def test_measured_figures_are_those_of_the_pages():
    """A page that is measured again changes what is said of it."""
    text = {name: " ".join(PAGES[f"docs/{name}.md"].split()) for name in ("annotators", "critic", "demo", "dpo")}
    assert "| 70% | 1 | 50 | 16% / 6% |" in text["annotators"] and "agreement is 58 %" in text["annotators"]
    assert "| 80% | 1 | 100 | 96% / 80% | 98% / 76% | 100% / 100% |" in text["annotators"]
    assert "| −1.17 to −0.81 |" in text["demo"] and "| +0.24 to +0.36 |" in text["demo"]
    assert "| 3 | 0.69 (" in text["dpo"] and "| 0 (SFT) | 0.48 (" in text["dpo"] and "1,024 prompts" in text["dpo"]
    columns = re.search(r"\| tokens \| (.*?) \|\n", PAGES["docs/critic.md"])[1].split(" | ")
    for method, noisy, short in (("GRPO, clip 0.4", "0.54", "0.66"), ("gated, clip 0.4", "0.49", "0.67")):
        row = re.search(rf"\| {method} \| (.*?) \|\n", PAGES["docs/critic.md"])[1].split(" | ")
        assert row[columns.index("noisy")].startswith(noisy) and row[columns.index("short")].startswith(short)
    assert "gold is 0.494 ± 0.023" in text["dpo"] and "| fixed 0.1 | 0.835 ± 0.028 | 0.751 ± 0.028 |" in text["dpo"]


def test_planned_figures_are_those_of_the_page():
    rows = {
        (model, how, gpus): peak
        for model, how, gpus, peak, *_ in table("docs/advise.md", "## When to leave this library")
    }
    for size, peaks in PLANNED.items():
        for how, peak in zip(("LoRA", "all weights"), peaks, strict=True):
            assert float(rows[size, how, "8"]) == peak


def test_what_would_change_is_what_the_rules_say():
    found = advise(replace(GOOD, agreement=0.5))
    assert [each.sentence.split(": ")[-1] for each in found.changes] == ["PPO", "PPO"]  # by a rule; by better labels
    found = advise(Facts(pairs=10))
    assert {each.sentence for each in found.changes} >= {
        "With 2,000 pairs: DPO, on the pairs",
        "With 1,000 demonstrations: SFT, on the demonstrations",
    }
    assert "passed" not in found.unknown and "accuracy" in found.unknown


def test_a_budget_of_labels_and_a_model_that_leaves():
    (caution,) = advise(Facts(pairs=500, labels=3_000, labels_per_item=3.0)).cautions
    assert "make 1,000 pairs at most, with 3.0 labels a pair: 1,500 in all, still below 2,000" in caution.sentence
    assert advise(replace(GOOD, ppo=TOO_LARGE, ppo_full=TOO_LARGE)).leaves is True
    assert advise(replace(GOOD, ppo=FITS, ppo_full=TOO_LARGE)).leaves is False
    assert advise(replace(GOOD, ppo=replace(FITS, gpus=16), ppo_full=FITS)).leaves is True  # two machines


@pytest.mark.slow
def test_a_fit_is_the_planners():
    shape = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 2, "num_attention_heads": 8}
    config = LlamaConfig(architectures=["LlamaForCausalLM"], vocab_size=1000, **shape)
    h100 = next(gpu for gpu in GPUS if gpu.name == "H100")
    lora, whole = (fit("ppo", config, h100, lora=lora, examples=1_000) for lora in (True, False))
    spread = fit("ppo", config, h100, 8, lora=False, reward_model=False)
    linear, embeddings = 2 * (4 * 1024**2 + 3 * 1024 * 4096), 2 * 1000 * 1024
    assert lora.parameters == whole.parameters == linear + embeddings + 5 * 1024  # norms; adapters are not counted
    assert spread.peak < whole.peak and lora.peak < whole.peak  # shards; and frozen weights have no optimizer
    assert spread.examples == 10_000 and spread.gpu_hours == pytest.approx(8 * spread.hours)
