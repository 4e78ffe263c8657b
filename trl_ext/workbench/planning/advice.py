"""Say what to train next: the rows of docs/advise.md's table that hold for the numbers given. The first one decides.

trl-ext advise --pairs 12000 --accuracy 0.66 --accuracy_low 0.62 --passed true --prompts 20000
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ...cli.parser import StrictTrlParser
from ...runs import check_settings, setting
from ...upstream import quiet


@dataclass
class AdviseArguments:
    """Declare what may be known; all of it is optional."""

    verifiable: bool | None = setting(None, "Whether a rule or a unit test can score an answer.")
    agreement: float | None = setting(None, "Share of pairs that two people label alike.", range="in [0, 1]")
    pairs: int | None = setting(None, "Number of preference pairs.", range=">= 0")
    demonstrations: int | None = setting(None, "Number of demonstrations.", range=">= 0")
    prompts: int | None = setting(None, "Number of prompts to sample answers to.", range=">= 0")
    accuracy: float | None = setting(
        None, "Share of held-out pairs in which the reward model is right.", range="in [0, 1]"
    )
    accuracy_low: float | None = setting(None, "Lower end of its interval.", range="in [0, 1]")
    passed: bool | None = setting(None, "Whether `trl-ext reward-report` says yes.")
    fits: bool | None = setting(None, "Whether PPO fits the GPUs and the hours, by `trl-ext plan`.")

    def __post_init__(self) -> None:
        check_settings(self)


class Rule(NamedTuple):
    """Advise a method where a condition holds."""

    method: str
    when: str
    holds: Callable[[AdviseArguments], bool]
    why: str


RULES = (
    Rule(
        "PPO, or TRL's GRPO where a prompt can be answered many times",
        "a rule scores answers, and there are 1,000 prompts or more, or nobody knows how many",
        lambda a: a.verifiable is True and (a.prompts or 1000) >= 1000,
        "needs no label (arXiv:2404.10719, 2501.12948)",
    ),
    Rule(
        "label more",
        "two labels of a pair agree in less than 60 %",
        lambda a: a.agreement is not None and a.agreement < 0.6,
        "where people are right in 70 % they agree in 58 %, and cannot be told from a coin",
    ),
    Rule(
        "label more",
        "the interval of the reward model's accuracy reaches down to 50 %",
        lambda a: a.accuracy_low is not None and a.accuracy_low <= 0.5,
        "it may be a coin",
    ),
    Rule(
        "SFT",
        "fewer than 2,000 pairs, or none known; 1,000 demonstrations or more",
        lambda a: (a.pairs or 0) < 2000 and (a.demonstrations or 0) >= 1000,
        "1,000 were enough for LIMA (2305.11206)",
    ),
    Rule(
        "label more",
        "fewer than 2,000 pairs, or none known",
        lambda a: (a.pairs or 0) < 2000,
        "with fewer comparisons no reward model of any size was much better than chance (2210.10760)",
    ),
    Rule("DPO", "the reward report says no", lambda a: a.passed is False, "PPO finds the flaw (docs/demo.md)"),
    Rule("DPO", "no reward model", lambda a: a.accuracy is None, "needs none (2305.18290)"),
    Rule(
        "DPO",
        "fewer than 1,000 prompts",
        lambda a: a.prompts is not None and a.prompts < 1000,
        "ours were 1,024 a round (docs/dpo.md)",
    ),
    Rule("DPO", "PPO does not fit the GPUs or the hours", lambda a: a.fits is False, "as planned (docs/plan.md)"),
    Rule(
        "PPO",
        "the reward model is right in 65 % or more, and its report says yes",
        lambda a: (a.accuracy or 0) >= 0.65 and a.passed is True,
        "InstructGPT's: 69.6 ± 0.9 % on people it had not seen (2203.02155)",
    ),
    Rule("online DPO", "else", lambda a: True, "the policy's own answers, and a model to judge after each round"),
)


def advise(args: AdviseArguments) -> list[Rule]:
    """Return the rules that hold, in their order; the first one decides."""
    return [rule for rule in RULES if rule.holds(args)]


def main(arguments: list[str] | None = None) -> None:
    quiet()
    (args,) = StrictTrlParser(AdviseArguments, without_arguments=__doc__).parse_args_and_config(arguments)
    first, *others = advise(args)
    print(f"{first.method}: {first.when}; {first.why}")
    for rule in others[:-1]:
        print(f"  else {rule.method}: {rule.when}; {rule.why}")


if __name__ == "__main__":
    main()
