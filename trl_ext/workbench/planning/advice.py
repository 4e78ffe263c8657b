"""Advise what to train next: print the rows of docs/advise.md's table that apply. The first one decides.

trl-ext advise --pairs 12000 --accuracy 0.66 --accuracy_low 0.62 --passed true --prompts 20000
"""

from dataclasses import dataclass

from ...cli.parser import StrictTrlParser
from ...runs import check_settings, setting
from ...upstream import quiet


@dataclass
class AdviseArguments:
    """Declare the arguments of `trl-ext advise`: facts about data and models, all of them optional."""

    verifiable: bool | None = setting(None, "Whether a rule or a unit test can score an answer.")
    agreement: float | None = setting(None, "Share of pairs on which two people agree.", range="in [0, 1]")
    pairs: int | None = setting(None, "Number of preference pairs.")
    demonstrations: int | None = setting(None, "Number of demonstrations.")
    prompts: int | None = setting(None, "Number of prompts to sample answers to.")
    accuracy: float | None = setting(
        None, "Share of held-out pairs in which the reward model is right.", range="in [0, 1]"
    )
    accuracy_low: float | None = setting(None, "Lower end of `accuracy`'s confidence interval.", range="in [0, 1]")
    passed: bool | None = setting(None, "Whether the reward model passes `trl-ext reward-report`.")
    fits: bool | None = setting(
        None, "Whether PPO fits into the GPUs and the hours that you have, according to `trl-ext plan`."
    )

    def __post_init__(self) -> None:
        check_settings(self)


def rows(a: AdviseArguments) -> list[tuple[bool, str, str]]:
    """Return the rules in order of priority: whether the condition holds, the condition in words, what to do then."""
    few_pairs = (a.pairs or 0) < 2000
    return [
        (
            a.verifiable is True and (a.prompts is None or a.prompts >= 1000),
            "a rule scores completions, and there are 1,000 prompts or more, or an unknown number",
            "GRPO of TRL, or PPO where a prompt is answered once, in several turns, or scored step by step",
        ),
        (a.agreement is not None and a.agreement < 0.6, "two labels of a pair agree in less than 60 %", "label more"),
        (
            a.accuracy_low is not None and a.accuracy_low <= 0.5,
            "the interval of the reward model's accuracy reaches down to 50 %",
            "label more",
        ),
        (
            few_pairs and (a.demonstrations or 0) >= 1000,
            "fewer than 2,000 pairs, or none known; 1,000 demonstrations or more",
            "SFT",
        ),
        (few_pairs, "fewer than 2,000 pairs, or none known", "label more"),
        (a.passed is False, "the reward report says no", "DPO"),
        (a.accuracy is None, "no reward model", "DPO"),
        (a.prompts is not None and a.prompts < 1000, "fewer than 1,000 prompts", "DPO"),
        (a.fits is False, "PPO does not fit the GPUs or the hours", "DPO"),
        (
            (a.accuracy or 0) >= 0.65 and a.passed is True,
            "the reward model is right in 65 % or more, and its report says yes",
            "PPO",
        ),
        (True, "else", "online DPO"),
    ]


def main(arguments: list[str] | None = None) -> None:
    quiet()
    (args,) = StrictTrlParser(AdviseArguments, without_arguments=__doc__).parse_args_and_config(arguments)
    first, *others = [f"{then}: {when}" for holds, when, then in rows(args) if holds]
    why = 'The rules and their sources: the page "What to train next" of the documentation'
    print(first, *(f"  else {row}" for row in others[:-1]), why, sep="\n")


if __name__ == "__main__":
    main()
