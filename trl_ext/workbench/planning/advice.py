"""Advise what to train next, from what is known about labels, reward model, prompts and budget."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from .capacity import A_MACHINE, Fit

Method = Literal["label-more", "sft", "dpo", "online-dpo", "ppo"]
TITLES: dict[Method, str] = {
    "label-more": "Label more first",
    "sft": "SFT, on the demonstrations",
    "dpo": "DPO, on the pairs",
    "online-dpo": "Online DPO, on the policy's own answers, in rounds",
    "ppo": "PPO",
}

# Lower bounds of what a method wants; docs/advise.md argues for each
AGREEMENT = 0.6  # share of pairs of labels of an item that are equal
ACCURACY = 0.65  # accuracy of a reward model on held-out pairs
PAIRS, DEMONSTRATIONS, PROMPTS = 2_000, 1_000, 1_000
PLENTY = 10_000  # pairs below which `trl-ext plan` warns

DPO = "arXiv:2305.18290"
DPO_AND_PPO = "arXiv:2404.10719"
INSTRUCTGPT = "arXiv:2203.02155"
LIMA = "arXiv:2305.11206"
OVEROPTIMIZATION = "arXiv:2210.10760"
R1 = "arXiv:2501.12948"
UNPACKING = "arXiv:2406.09279"
ANNOTATORS = "docs/annotators.md#who-is-found"
CRITIC = "docs/critic.md#the-table"
BETA = "docs/dpo.md#which-β"
DEMO = "docs/demo.md#what-it-claims"
DISTRIBUTED = "docs/distributed.md#what-was-run"
LEAVE = "docs/advise.md#when-to-leave-this-library"
ONLINE = "docs/dpo.md#online-dpo"
PLAN = "docs/plan.md#what-it-knows-and-assumes"
SHARED = "docs/prompts.md#what-is-a-duplicate"


class Reason(NamedTuple):
    """
    Hold a sentence with a figure, and the figure's source.

    Args:
        sentence: the sentence.
        source: where the figure is from: an arXiv id, a page of the documentation, or an address.
    """

    sentence: str
    source: str


@dataclass(frozen=True)
class Leak:
    """
    Count the rows of a held-out set that have near duplicates in other sets.

    Args:
        name: name of the held-out set.
        shared: number of its rows that have a near duplicate in another set.
        rows: number of all its rows.
    """

    name: str
    shared: int
    rows: int


@dataclass(frozen=True)
class Facts:
    """
    Hold what is known about the data, the models and the budget; None means unknown.

    Args:
        demonstrations, pairs, prompts: number of each to train on.
        verifiable: whether a rule or a unit test can score an answer.
        agreement: share of pairs of labels for the same item that are equal.
        labels_per_item: mean number of labels of a pair.
        accuracy, accuracy_low: the reward model's accuracy on held-out pairs, and the lower end of its interval.
        passed: whether the reward model passed its report.
        complaints: the report's reasons why the reward model did not pass.
        leaks: for each held-out set, how many rows it shares with other sets.
        gpu_hours, labels: the budget: GPU-hours, and labels that can still be collected.
        ppo, ppo_full: what PPO takes on the GPUs if LoRA is trained, and if all weights are trained.
    """

    demonstrations: int | None = None
    pairs: int | None = None
    prompts: int | None = None
    verifiable: bool | None = None
    agreement: float | None = None
    labels_per_item: float | None = None
    accuracy: float | None = None
    accuracy_low: float | None = None
    passed: bool | None = None
    complaints: tuple[str, ...] = ()
    leaks: tuple[Leak, ...] | None = None
    gpu_hours: float | None = None
    labels: int | None = None
    ppo: Fit | None = None
    ppo_full: Fit | None = None


class Rule(NamedTuple):
    """
    Advise `method` if `holds(facts)` is true.

    `why` is the reason, as a template that [`_filled`] fills, and `source` is where the reason's figures are from.
    """

    method: Method
    holds: Callable[[Facts], bool]
    why: str
    source: str


@dataclass(frozen=True)
class Recommendation:
    """
    Recommend what to do, with reasons.

    Args:
        method: what to do, a key of `TITLES`.
        reasons: why; the reason of the rule that decided comes first.
        cautions: what to take care of.
        leave: reasons to leave this library for another, or to stay.
        leaves: whether another library serves this model and these GPUs better; None if model and GPUs are unknown.
        changes: what the advice would be if one fact were different.
        unknown: names of the unknown facts that could change the advice.
    """

    method: Method
    reasons: tuple[Reason, ...]
    cautions: tuple[Reason, ...] = ()
    leave: tuple[Reason, ...] = ()
    leaves: bool | None = None
    changes: tuple[Reason, ...] = ()
    unknown: tuple[str, ...] = ()


def _many(count: int | None, least: int) -> bool:
    return count is not None and count >= least


def _few(count: int | None, least: int) -> bool:
    return count is not None and count < least


def _affordable(facts: Facts) -> bool:
    """Return whether PPO fits in memory and budget; True where nothing is known against it."""
    planned, budget = facts.ppo, facts.gpu_hours
    return planned is None or (planned.fits and (budget is None or planned.gpu_hours <= budget))


def _cost(facts: Facts) -> str:
    """Return a sentence: that PPO does not fit in memory, or else how its GPU-hours compare with the budget."""
    planned = facts.ppo
    assert planned is not None
    if not planned.fits:
        return f"{_needs(planned)}, so PPO does not fit"
    return (
        f"PPO with LoRA takes some {planned.gpu_hours:,.0f} GPU-hours for {planned.examples:,} episodes, as planned; "
        f"the budget is {facts.gpu_hours:,.0f}"
    )


def _needs(planned: Fit) -> str:
    what = "LoRA" if planned.lora else "all weights"
    return (
        f"PPO of {planned.parameters / 1e9:.2g} billion parameters with {what} needs {planned.peak:.1f} GiB on each "
        f"of {planned.gpus} {planned.gpu} ({planned.memory} GB), in the phase `{planned.phase}`"
    )


def _close(planned: Fit) -> str:
    return " (barely: less than a tenth of the memory is free)" if planned.peak > 0.9 * planned.memory else ""


def _there_are(count: int | None, what: str) -> str:
    return f"No {what} are known" if count is None else f"There are {count:,} {what}"


def _filled(template: str, facts: Facts) -> str:
    """Fill the placeholders of a template with facts, and with phrases made from facts."""
    return template.format(
        **vars(facts),
        cost="" if _affordable(facts) else _cost(facts),
        reasons=len(facts.complaints),
        there_are_pairs=_there_are(facts.pairs, "pairs"),
        there_are_demonstrations=_there_are(facts.demonstrations, "demonstrations").lower(),
    )


# The first rule whose condition holds decides. Their order makes sure that more agreement, more pairs or a higher
# accuracy never turns the advice from training to labelling (tests/workbench/planning/test_advice.py).
RULES = (
    Rule(
        "ppo",
        lambda f: f.verifiable is True and not _few(f.prompts, PROMPTS),
        "A rule or unit test scores the answers, so no label is needed: with unit tests PPO brought a 34B model to "
        "22.4 % of a code competition's tasks, where AlphaCode-41B had 16.4 % (10@1k)",
        DPO_AND_PPO,
    ),
    Rule(
        "label-more",
        lambda f: f.agreement is not None and f.agreement < AGREEMENT,
        f"Two labels of a pair agree in {{agreement:.1%}}, below {AGREEMENT:.0%}: people who are right in 70 % agree "
        "in 58 %, and with 50 labels each only 16 % of the annotators who toss a coin are found",
        ANNOTATORS,
    ),
    Rule(
        "label-more",
        lambda f: f.accuracy_low is not None and f.accuracy_low <= 0.5,
        f"The reward model is right in {{accuracy:.1%}} of held-out pairs, and its interval begins at "
        f"{{accuracy_low:.1%}}: a coin has 50 %, and reward models of fewer than {PAIRS:,} comparisons were hardly "
        "better",
        OVEROPTIMIZATION,
    ),
    Rule(
        "sft",
        lambda f: not _many(f.pairs, PAIRS) and _many(f.demonstrations, DEMONSTRATIONS),
        f"{{there_are_pairs}} ({PAIRS:,} are wanted), but there are {{demonstrations:,}} demonstrations: with 1,000 "
        "good ones a 65B model's answers were as good as GPT-4's, or better, in 43 %",
        LIMA,
    ),
    Rule(
        "label-more",
        lambda f: not _many(f.pairs, PAIRS),
        f"{{there_are_pairs}} and {{there_are_demonstrations}}: with fewer than {PAIRS:,} comparisons reward models "
        "of every size were hardly better than chance",
        OVEROPTIMIZATION,
    ),
    Rule(
        "dpo",
        lambda f: f.passed is False,
        "The reward report says no ({reasons} reason(s)), and DPO needs no reward model: with a reward model that "
        "had a planted flaw, PPO without guard rails ended 0.81 to 1.17 of gold score below SFT",
        DEMO,
    ),
    Rule(
        "dpo",
        lambda f: f.accuracy is None,
        f"There are {{pairs:,}} pairs ({PAIRS:,} are wanted) and no reward model is known, which DPO does not need: "
        "summaries by DPO won 61 % against the reference's, those by PPO 57 %",
        DPO,
    ),
    Rule(
        "dpo",
        lambda f: _few(f.prompts, PROMPTS),
        f"There are {{prompts:,}} prompts, fewer than {PROMPTS:,}, so the policy's own answers would soon repeat: our "
        "measured gain took 1,024 prompts a round",
        ONLINE,
    ),
    Rule("dpo", lambda f: not _affordable(f), "{cost}", PLAN),
    Rule(
        "ppo",
        lambda f: f.accuracy is not None and f.accuracy >= ACCURACY and f.passed is True,
        f"The reward model is right in {{accuracy:.1%}} of held-out pairs ({ACCURACY:.0%} are wanted) and its report "
        "says yes; InstructGPT's was right in 69.6 ± 0.9 % for people that it had not seen",
        INSTRUCTGPT,
    ),
    Rule(
        "online-dpo",
        lambda f: True,
        f"The reward model is right in {{accuracy:.1%}} of held-out pairs (PPO wants {ACCURACY:.0%} and a report that "
        "says yes); three rounds of online DPO, which can be judged one by one, raised gold from 0.48 to 0.69",
        ONLINE,
    ),
)

# For each method: what else speaks for it, and what it costs
EVIDENCE: dict[Method, tuple[Reason, ...]] = {
    "label-more": (
        Reason("Better preference data gave up to 8 %, PPO instead of DPO up to 2.5 %", UNPACKING),
        Reason(
            "With 100 labels each, and people who are right in 80 %, z < −3 finds 80 % of the annotators who toss a "
            "coin and all adversarial ones",
            ANNOTATORS,
        ),
    ),
    "sft": (
        Reason("InstructGPT had 13,000 prompts for SFT, 33,000 for its reward model and 31,000 for PPO", INSTRUCTGPT),
    ),
    "dpo": (
        Reason(
            "With a quarter of the labels flipped, DPO still raised gold from 0.494 ± 0.023 to 0.751 ± 0.028",
            BETA,
        ),
        Reason("What it gives up: PPO was better by up to 2.5 % in math and 1.2 % elsewhere", UNPACKING),
    ),
    "online-dpo": (
        Reason("What it gives up: PPO was better than DPO by up to 2.5 % in math and 1.2 % elsewhere", UNPACKING),
    ),
    "ppo": (
        Reason(
            "Hold the KL: in four seeds guarded PPO raised gold by 0.24 to 0.36, and unguarded PPO lowered it by 0.81 "
            "to 1.17",
            DEMO,
        ),
        Reason(
            "Where each prompt can be answered several times, TRL's GRPO needs no critic and got as far with the same "
            "clip range of 0.4: 0.54 of the gain against 0.49 with noisy scores, 0.66 against 0.67 without noise",
            CRITIC,
        ),
    ),
}

# Size of a model → GiB that PPO takes of each of 8 GPUs with 80 GB, with LoRA and with all weights trained, by
# `trl-ext plan`; a test compares them with the table of docs/advise.md
PLANNED = {"8B": (21.3, 64.4), "32B": (77.1, 257.0), "70B": (158.1, 551.3)}
OTHERS = (
    Reason(
        "OpenRLHF trains more than 70 billion parameters, by its own account", "https://github.com/OpenRLHF/OpenRLHF"
    ),
    Reason("verl scales to 70B models and hundreds of GPUs, by its own account", "https://github.com/volcengine/verl"),
    Reason(
        "NeMo RL goes from 1 GPU to thousands, and beyond 100 billion parameters, by its own account",
        "https://docs.nvidia.com/nemo/rl/latest",
    ),
)


class Lever(NamedTuple):
    """
    Change some facts, to see what the advice would then be.

    Facts in `least` are raised to the values there if they are lower or unknown; facts in `others` are set to the
    values there. `what` is a template that says the change in words, and `source` is where its figure is from.
    """

    what: str
    source: str
    least: dict[str, float]
    others: dict[str, Any] = {}

    def changed(self, facts: Facts) -> Facts:
        """Return a copy of `facts` with this change."""
        raised = {name: max(getattr(facts, name) or 0, value) for name, value in self.least.items()}
        return replace(facts, **{**raised, **self.others})


LEVERS = (
    Lever(
        "a rule or unit test that scores answers (rules alone brought R1-Zero from 15.6 % to 71.0 % on AIME 2024, in "
        f"the paper's first version) and {PROMPTS:,} prompts",
        R1,
        {"prompts": PROMPTS},
        {"verifiable": True},
    ),
    Lever(f"labels of a pair that are the same in {AGREEMENT:.0%}", ANNOTATORS, {"agreement": AGREEMENT}),
    Lever(f"{PAIRS:,} pairs", OVEROPTIMIZATION, {"pairs": PAIRS}),
    Lever(f"{DEMONSTRATIONS:,} demonstrations", LIMA, {"demonstrations": DEMONSTRATIONS}),
    Lever(
        f"a reward model that is right in {ACCURACY:.0%}, clearly above a coin, and whose report says yes",
        INSTRUCTGPT,
        {"accuracy": ACCURACY},
        {"accuracy_low": None, "passed": True, "complaints": ()},
    ),
    Lever(f"{PROMPTS:,} prompts", ONLINE, {"prompts": PROMPTS}),
    Lever(
        "GPUs and a budget that hold PPO ({ppo.peak:.1f} GiB of each, {ppo.gpu_hours:,.0f} GPU-hours)",
        PLAN,
        {},
        {"ppo": None},
    ),
)


def advise(facts: Facts) -> Recommendation:
    """Recommend what to train next, with reasons: the method of the first of [`RULES`] whose condition holds."""
    rule = next(rule for rule in RULES if rule.holds(facts))
    leave, leaves = _leave(facts)
    return Recommendation(
        rule.method,
        (Reason(_filled(rule.why, facts), rule.source), *EVIDENCE[rule.method]),
        tuple(_cautions(facts, rule.method)),
        leave,
        leaves,
        tuple(_changes(facts, rule.method)),
        tuple(_unknown(facts, rule.method)),
    )


def _changes(facts: Facts, method: Method) -> Iterator[Reason]:
    for lever in LEVERS:
        other = next(rule.method for rule in RULES if rule.holds(lever.changed(facts)))
        if other != method:
            yield Reason(f"With {_filled(lever.what, facts)}: {TITLES[other]}", lever.source)


def _cautions(facts: Facts, method: Method) -> Iterator[Reason]:
    for leak in facts.leaks or ():
        if leak.shared:
            yield Reason(
                f"{leak.shared:,} of {leak.rows:,} rows of {leak.name!r} ({leak.shared / leak.rows:.1%}) have a near "
                "duplicate in another set, so results on this set are too good",
                SHARED,
            )
    if method in ("dpo", "online-dpo", "ppo") and facts.verifiable is not True and _few(facts.pairs, PLENTY):
        yield Reason(
            f"{facts.pairs:,} pairs are enough to learn from, but fewer than {PLENTY:,} are mostly memorised: watch "
            "the held-out accuracy, and stop early",
            PLAN,
        )
    if method == "ppo" and not _affordable(facts):
        yield Reason(_cost(facts), PLAN)
    if method == "label-more" and facts.labels is not None:
        each = facts.labels_per_item or 1.0
        more = int(facts.labels / each)
        total = (facts.pairs or 0) + more
        yield Reason(
            f"The budget's {facts.labels:,} labels make {more:,} pairs at most, with {each:.1f} labels a pair: "
            f"{total:,} in all, {'at least' if total >= PAIRS else 'still below'} {PAIRS:,}",
            OVEROPTIMIZATION,
        )


def _leave(facts: Facts) -> tuple[tuple[Reason, ...], bool | None]:
    """
    Return the reasons to leave this library for another or to stay, and whether to leave.

    Whether to leave is None if the model and the GPUs are unknown.
    """
    lora, full = facts.ppo, facts.ppo_full
    if lora is None or full is None:
        parts = [f"{size} {with_lora:.0f} and {whole:.0f}" for size, (with_lora, whole) in PLANNED.items()]
        sentence = (
            "On 8 GPUs with 80 GB, PPO takes this many GiB on each, with LoRA and with all weights: "
            f"{', '.join(parts)}; while it generates, one GPU holds all of the policy's weights"
        )
        return (Reason(sentence, LEAVE), *OTHERS), None
    if not lora.fits:
        return (Reason(f"{_needs(lora)}: one GPU holds all weights while it generates", LEAVE), *OTHERS), True
    if lora.gpus > A_MACHINE:
        machines = -(-lora.gpus // A_MACHINE)
        sentence = (
            f"{lora.gpus} GPUs are {machines} machines of {A_MACHINE}: this library was never run on several machines"
        )
        return (Reason(sentence, DISTRIBUTED), *OTHERS), True
    if not full.fits:
        stay, leave = f"{_needs(lora)}: stay, with LoRA{_close(lora)}", f"{_needs(full)}: leave for these"
        return (Reason(stay, LEAVE), Reason(leave, LEAVE), *OTHERS), False
    return (Reason(f"{_needs(full)}: stay{_close(full)}", LEAVE),), False


def _unknown(facts: Facts, method: Method) -> Iterator[str]:
    """Yield the names of unknown facts that could change the advice."""
    of_labels = () if facts.verifiable is True else ("agreement", "pairs", "accuracy", "passed")
    for name in ("verifiable", *of_labels, "demonstrations", "prompts", "leaks", "ppo"):
        if getattr(facts, name) is None and not (name == "passed" and facts.accuracy is None):
            yield name
