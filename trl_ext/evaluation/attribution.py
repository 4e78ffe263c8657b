"""Find what a reward paid for: cheap features of completions, and the part of the score's rise that each explains."""

import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np

from ..functional import student_quantile
from .texts import words_of

# Feature of every completion → what it is in words, and its unit; without a unit its share of completions is told
FIXED = {
    "length": ("the length", "words"),
    "empty": ("empty answers", ""),
    "copied": ("copies of the prompt", "% of its pairs of words"),
    "prompt words": ("words of the prompt", "an answer"),
    "prompt word again": ("a word of the prompt repeated", "times an answer"),
    "repeated": ("repetition", "% of the pairs of words"),
    "doubled": ("a word twice in a row", ""),
    "capitals": ("capital letters", "% of characters"),
    "capital words": ("words in capitals", ""),
    "digits": ("digits", "% of characters"),
    "repeated calls": ("tool calls with the same arguments as an earlier one", "an answer"),
    "calls": ("tool calls", "an answer"),
    **{f"character:{each}": (f"the character {each!r}", "% of characters") for each in string.ascii_lowercase},
}
_TRACKED, _FIRST = 160, 600  # features at most, and phrases of the first rollouts that are remembered
_LETTERS = 40  # of a word
_EDGE = 256  # words of each end of a completion whose phrases are read
_RIDGE = 1e-3  # of a feature's own variance: features that are the same would have no solution
_PARTS = re.compile(r"\w(?:.*\w)?|[^\w^$]")  # of a word: itself, and each mark before and after it


def features_of(
    prompts: Sequence[str], completions: Sequence[str], calls: Sequence[Sequence[tuple[str, str]]] | None = None
) -> list[dict[str, float]]:
    """
    Return for each completion a mapping from the features that it has to their values.

    The features are:

    - those of `FIXED`;
    - `phrase:…` for each phrase of one to four words: the square root of the phrase's count in the completion. A
      punctuation mark counts as a word; ^ and $ mark beginning and end;
    - `call:…` for each tool: how often the completion calls it.

    A prompt's words count as the prompt's only if at most half of the rollout's prompts contain them.

    Args:
        prompts, completions: (N) texts.
        calls: (N) each completion's tool calls: name and arguments. None for no calls.
    """
    asked = [_parts(prompt) for prompt in prompts]
    known = Counter(word for words in set(map(tuple, asked)) for word in set(words))
    half = max(1, len(set(prompts)) // 2)
    rows = []
    for words, text, called in zip(asked, completions, calls or [()] * len(prompts), strict=True):
        answer = _parts(text)
        counts, pairs, solid = Counter(answer), list(zip(answer, answer[1:], strict=False)), "".join(text.split())
        own = [counts[word] for word in {*words} if known[word] <= half and counts[word]]
        of_prompt, share = {*zip(words, words[1:], strict=False)}, 100 / max(len(solid), 1)
        lower = solid.casefold()
        row: dict[str, float] = {
            "length": len(words_of(text)),
            "empty": not answer,
            "copied": 100 * len(of_prompt & {*pairs}) / max(len(of_prompt), 1),
            "prompt words": min(sum(own), 8),
            "prompt word again": min(max(own, default=1) - 1, 4),
            "repeated": 100 * (1 - len({*pairs}) / max(len(pairs), 1)) if pairs else 0,
            "doubled": sum(one == other for one, other in pairs) ** 0.5,
            "capitals": sum(map(str.isupper, solid)) * share,
            "capital words": sum(len(word) > 1 and word.isupper() for word in text.split()) ** 0.5,
            "digits": sum(map(str.isdigit, solid)) * share,
            "repeated calls": len(called) - len({*called}),
            "calls": len(called),
            **{f"character:{each}": lower.count(each) * share for each in string.ascii_lowercase},
            **Counter(f"call:{name}" for name, _ in called),
        }
        whole = ["^", *answer[:_EDGE], *answer[_EDGE:][-_EDGE:], "$"]
        phrases = Counter(" ".join(whole[at : at + n]) for n in (1, 2, 3, 4) for at in range(len(whole) - n + 1))
        for edge in ("^", "$", "^ $"):  # without a word
            phrases.pop(edge, None)
        rows.append(row | {f"phrase:{phrase}": min(times, 16) ** 0.5 for phrase, times in phrases.items()})
    return rows


def _parts(text: str) -> list[str]:
    return [part[:_LETTERS] for word in words_of(text.casefold()) for part in _PARTS.findall(word)]


class Sums:
    """
    Hold the sums over rollouts that `reward_attribution` reads, in constant memory.

    A rollout's completions to the same prompt form a group. Effects are measured within groups or, if groups have
    fewer than two completions on average, within the rollout. Standard errors treat groups, not completions, as
    independent, since answers to one prompt are alike.

    - `names`: "score" and the F − 1 features that are tracked
    - `gram`: (F, F) Σ x̃ x̃ᵀ over all completions. x is the score and the features, and x̃ is x minus
      its mean in the group, or in the rollout. `free`: the degrees of freedom of `gram`
    - `between`: (F) sum of squares of the groups' means around their rollout's mean. `dof`: its degrees of freedom
    - `first`: for each name, Σ x and the number of x ≠ 0 in the first rollouts. `begin`: their number of completions
    - `now`: (2, F) the same two sums over the newest rollouts. Each rollout of 16 or more completions halves the
      weight of the rollouts before it. `newest`: the sum of the completions' weights, and of their squared weights
    - `rollouts`, `count`, `groups`: numbers of rollouts, completions and groups so far

    The first rollouts are those until there are 32 completions and 4 groups, four rollouts at most. A phrase or call
    can be tracked once 5 % of a rollout's completions have it; those are tracked whose share of completions has
    changed most since the first rollouts. Before a feature is tracked, its share counts as unchanged.

    Args:
        saved: the result of `dump`, to resume; None for new sums.
    """

    def __init__(self, saved: dict[str, Any] | None = None) -> None:
        self.names = ["score", *FIXED]
        self.first: dict[str, Sequence[float]] = {}
        size = len(self.names)
        self.gram, self.between = np.zeros((size, size)), np.zeros(size)
        self.now, self.newest = np.zeros((2, size)), np.zeros(2)
        self.free = self.dof = self.begin = self.rollouts = self.count = self.groups = 0
        for name, each in (saved or {}).items():
            setattr(self, name, np.array(each) if isinstance(getattr(self, name), np.ndarray) else each)

    def dump(self) -> dict[str, Any]:
        """Return all sums as lists and numbers, exactly."""
        return {name: each.tolist() if isinstance(each, np.ndarray) else each for name, each in vars(self).items()}

    @property
    def begins(self) -> bool:
        """Return whether the first rollouts, with which later ones are compared, are not complete yet."""
        return self.rollouts < 4 and (self.count < 32 or self.groups < 4)

    def start(self, names: Sequence[str]) -> np.ndarray:
        """
        Return the mean of each of F features (`names`), and the share of completions that have it, in the first
        rollouts: (2, F).
        """
        return np.array([self.first.get(name, (0.0, 0)) for name in names]).T / self.begin

    def add(self, rows: list[dict[str, float]], scores: Sequence[float], groups: Sequence[str]) -> None:
        """
        Add a rollout.

        Args:
            rows: (N) features of each completion, from `features_of`.
            scores: (N) finite scores.
            groups: (N) the prompt of each completion.
        """
        spread = Counter(name for row in rows for name in row.keys() - FIXED.keys())
        rows = [{"score": score, **row} for score, row in zip(scores, rows, strict=True)]
        if self.begins:  # more than are tracked, since any phrase may spread later
            self.begin += len(rows)
            for name in ("score", *FIXED, *(name for name, _ in spread.most_common(_FIRST))):
                values, (value, has) = [row.get(name, 0.0) for row in rows], self.first.get(name, (0.0, 0))
                self.first[name] = [value + sum(values), has + sum(map(bool, values))]
        self._track(spread, len(rows))
        x = np.array([[*map(row.get, self.names, repeat(0.0))] for row in rows])
        _, group = np.unique(groups, return_inverse=True)
        size = np.bincount(group)
        means = np.zeros((len(size), x.shape[1]))
        np.add.at(means, group, x)
        means /= size[:, None]
        if len(size) > 1:
            self.between += ((means - means.mean(0)) ** 2).sum(0)
        elif self.rollouts:  # only the difference to those before tells how groups differ
            self.between += (means[0] - self.now[0] / self.newest[0]) ** 2 / 2
        self.dof += max(len(size) - 1, min(self.rollouts, 1))
        keep = 1 - 0.5 * min(1, len(x) / 16)
        self.now = keep * self.now + [x.sum(0), (x != 0).sum(0)]
        self.newest = np.array([keep, keep**2]) * self.newest + len(x)
        is_within = len(x) >= 2 * len(size)
        centred = x - (means[group] if is_within else x.mean(0))
        self.gram += centred.T @ centred
        self.free += len(x) - (len(size) if is_within else 1)
        self.rollouts, self.count, self.groups = self.rollouts + 1, self.count + len(x), self.groups + len(size)

    def _track(self, spread: Counter[str], rows: int) -> None:
        """
        Choose the phrases and calls to track: those whose share has changed most since the first rollouts. `spread`
        counts the completions, of `rows` in this rollout, that have each of them.
        """
        frequent = {name for name, times in spread.items() if times >= max(3, rows / 20)}
        # Of phrases in the same completions the longest says most
        new = sorted(frequent - {*self.names}, key=lambda name: (-spread[name], -name.count(" "), name))
        names = [*self.names, *new]
        start = self.start(names)
        now = np.hstack([self.now, start[:, len(self.names) :] * self.newest[0]])
        share = (now[1] + [spread[name] for name in names]) / (self.newest[0] + rows)
        moved = np.abs(share - start[1])
        moved[: 1 + len(FIXED)] = np.inf
        kept = np.sort(np.argsort(-moved, kind="stable")[:_TRACKED])
        self.names, self.now = [names[at] for at in kept], now[:, kept]
        self.gram = np.pad(self.gram, (0, len(new)))[np.ix_(kept, kept)]
        self.between = np.pad(self.between, (0, len(new)))[kept]


@dataclass
class Paid:
    """
    Describe how much one feature contributes to the rise of the score.

    Args:
        name: the feature.
        first, now: mean of its values in the first rollouts and in the newest ones.
        first_share, share: share of completions with a value other than 0, in the first and in the newest rollouts.
        effect: change of the score when the feature rises by 1, in units of the score.
        error: standard error of `paid`.
        paid: effect × change of the mean, in units of the score.
        part: `paid` ÷ the rise of the score.
    """

    name: str
    first: float
    now: float
    first_share: float
    share: float
    effect: float
    error: float
    paid: float
    part: float

    @property
    def kind(self) -> str:
        """Return the kind of the feature, the part of its name before a colon."""
        return self.name.partition(":")[0]

    @property
    def is_share(self) -> bool:
        """Return whether to describe the feature by the share of completions that have it, instead of its mean."""
        return not FIXED.get(self.name, ("", ""))[1]

    @property
    def what(self) -> str:
        """Return the feature in words, such as `the phrase 'thank you'`."""
        if self.name in FIXED:
            return FIXED[self.name][0]
        of = self.name.partition(":")[2]
        if self.kind == "call":
            return f"calls of the tool {of!r}"
        where = {(True, True): "the answer", (True, False): "the beginning", (False, True): "the ending"}
        return f"{where.get((of[0] == '^', of[-1] == '$'), 'the phrase')} {of.strip('^$ ')!r}"

    @property
    def has_content(self) -> bool:
        """Return whether good answers may need the feature: digits, tool calls, or words that became rarer."""
        falls = self.now < self.first
        return self.kind in ("digits", "calls", "call") or (falls and self.kind not in ("length", "character"))

    def in_words(self, sigma: float) -> str:
        """Return a line on the feature: its change, and its effect ÷ `sigma`, the scores' standard deviation."""
        worth = f"worth {self.effect / (sigma or 1):+.2g} σ"
        if self.is_share:
            moved = f"{self.first_share:.0%} → {self.share:.0%} of answers, {worth}"
        else:
            moved = f"{self.first:.3g} → {self.now:.3g} {FIXED[self.name][1]}, {worth} each"
        return f"{self.what[0].upper()}{self.what[1:]}: {moved}: {self.part:.0%} of the rise"


class Attribution(NamedTuple):
    """
    Hold what [`reward_attribution`] returns.

    Args:
        rise: how far the mean score has risen since the first rollouts.
        error: the standard error of the rise.
        sigma: the standard deviation of single scores within a prompt.
        paid: the features that explain a part of the rise.
    """

    rise: float
    error: float
    sigma: float
    paid: list[Paid]


def reward_attribution(sums: Sums, expected: Sequence[str] = ()) -> Attribution:
    r"""Attribute the rise of the mean score since the first rollouts to the features that changed with it.

    A regression of the scores y on a set S of features, within prompts or within rollouts, gives the features' effects
    b = (G_SS + 0.001 diag G_SS)⁻¹ G_Sy, from blocks of G = `sums.gram`. If the means have changed by Δ, feature j was
    paid b_j Δ_j. S grows as in forward selection, each time by the feature that leaves the least unexplained variation

        G_yy − b·G_Sy + N/4 (Δ_y − b·Δ_S)².

    The last term is the variation between the first and the newest rollouts, as if each had half of all N completions.
    So overlapping phrases, and features that only occur together with one that pays, count once. Selection ends when a
    feature explains less than 2 %, or after six features. Only features whose mean changed significantly, corrected
    for the number of features, are selected.

    Args:
        sums: the rollouts' sums.
        expected: features that are selected first; see [`is_expected`].
    """
    start, end = sums.start(sums.names), sums.now / sums.newest[0]
    (change, _), gram = end - start, sums.gram
    ridged = gram + _RIDGE * np.diag(np.diag(gram))
    # A few groups may be alike by chance: another one is added that differs
    variance = (sums.between + change**2 / 4) / (sums.dof + 1) * sums.count / sums.groups  # of a completion
    errors = np.sqrt(variance * (1 / sums.begin + sums.newest[1] / sums.newest[0] ** 2))
    rise, weight = float(change[0]), sums.count / 4
    moved = np.divide(change, errors, out=np.zeros_like(change), where=errors > 0)
    least = student_quantile(0.05 / len(sums.names), np.inf)
    left = {at for at in range(1, len(sums.names)) if abs(moved[at]) > least and gram[at, at] > 0}

    def unexplained(chosen: list[int]) -> tuple[float, np.ndarray]:
        effects = np.linalg.solve(ridged[np.ix_(chosen, chosen)], gram[chosen, 0])
        between = rise - change[chosen] @ effects
        return float(gram[0, 0] - effects @ gram[chosen, 0] + weight * between**2), effects

    chosen: list[int] = []
    total, rest = max(float(gram[0, 0] + weight * rise**2), 1e-30), 1.0
    for candidates in ({at for at in left if is_expected(sums.names[at], expected)}, left):
        while candidates and len(chosen) < 6:
            # Of features that explain the same, one that spreads says most, and a character least
            lowest, *_, at = min(
                (round(unexplained([*chosen, at])[0] / total, 3), name.startswith("character"), change[at] < 0, at)
                for at in candidates
                for name in [sums.names[at]]
            )
            if rest - lowest < 0.02:
                break
            chosen, rest = [*chosen, at], lowest
            candidates.discard(at)
            left.discard(at)
    sigma = np.sqrt(gram[0, 0] / max(sums.free, 1))
    paid = []
    if chosen:
        _, effects = unexplained(chosen)
        residual = max(gram[0, 0] - effects @ gram[chosen, 0], 0) / max(sums.free - len(chosen), 1)
        spread = residual * np.linalg.inv(ridged[np.ix_(chosen, chosen)])
        for at, effect, variance in zip(chosen, effects, np.diag(spread), strict=True):
            error = np.hypot(effect * errors[at], change[at] * np.sqrt(variance))
            means = start[0, at], end[0, at], start[1, at], end[1, at]
            amount, part = effect * change[at], effect * change[at] / rise if rise else 0.0
            paid.append(Paid(sums.names[at], *map(float, (*means, effect, error, amount, part))))
    return Attribution(rise, float(errors[0]), float(sigma), sorted(paid, key=lambda each: -each.paid))


def is_expected(name: str, expected: Sequence[str]) -> bool:
    """
    Return whether `expected` has a feature's name, its kind (`phrase`), or a phrase that contains it or is part of it.

    >>> is_expected("phrase:love you $", ["length", "phrase:i love you"])
    True
    """
    kind, _, of = name.partition(":")
    said = f" {of.strip(string.punctuation + ' ')} "
    phrases = (f" {' '.join(_parts(each[7:]))} " for each in expected if kind == "phrase" == each.partition(":")[0])
    return name in expected or kind in expected or any(said in each or each in said for each in phrases)
