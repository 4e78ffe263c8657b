"""Find what a reward paid for: cheap features of completions, and the part of the score's rise that each explains."""

import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .words import words_of

# Feature of every completion → its unit; "" for a feature that is reported as the share of completions that have it
FIXED = {
    "length": "words",
    "empty answers": "",
    "words of the prompt": "a completion",
    "a word of the prompt repeated": "times a completion",
    "repetition": "% of the pairs of words",
    "capital letters": "% of characters",
    "digits": "% of characters",
    "repeated tool calls": "a completion",
    "tool calls": "a completion",
    **{f"character:{each}": "% of characters" for each in string.ascii_lowercase},
}
_TRACKED, _FIRST = 160, 600  # features at most, and phrases of the first rollouts that are remembered
_LETTERS = 40  # of a word
_EDGE = 256  # words of each end of a completion whose phrases are read
_RIDGE = 1e-3  # of a feature's own variance: features that are the same would have no solution
_LEAST = 0.02  # part of the variation that a feature must explain
_MOVED = 3.4  # standard errors: 5 % ÷ 160 features
_PARTS = re.compile(r"\w(?:.*\w)?|\W")  # of a word: itself, and each mark before and after it


def features_of(
    prompts: Sequence[str], completions: Sequence[str], calls: Sequence[Sequence[bool]] | None = None
) -> list[dict[str, float]]:
    """
    Return for each completion a mapping from the features that it has to their values.

    The features are:

    - those of `FIXED`, each in its unit there; of the prompt's words, only those of four letters or more count;
    - `phrase:…`, with the value 1, for each phrase of one to four words in the completion's first 256 words or last
      256 words. A punctuation mark counts as a word.

    Args:
        prompts, completions: (N) texts.
        calls: (N) for each tool call of a completion, whether it repeats an earlier one. None for no calls.
    """
    rows = []
    for prompt, text, called in zip(prompts, completions, calls or [()] * len(prompts), strict=True):
        parts = _parts(text)
        words = {*_parts(prompt)}
        share = 100 / max(len(text), 1)
        own = Counter(word for word in parts if word in words and len(word) > 3)
        pairs = [*zip(parts, parts[1:], strict=False)]
        row: dict[str, float] = {
            "length": len(words_of(text)),
            "empty answers": not parts,
            "words of the prompt": min(own.total(), 8),
            "a word of the prompt repeated": min(max(own.values(), default=1) - 1, 4),
            "repetition": 100 - 100 * len({*pairs}) / len(pairs) if pairs else 0,
            "capital letters": sum(map(str.isupper, text)) * share,
            "digits": sum(map(str.isdigit, text)) * share,
            "repeated tool calls": sum(called),
            "tool calls": len(called),
            **{f"character:{each}": text.casefold().count(each) * share for each in string.ascii_lowercase},
        }
        parts = parts[:_EDGE] + parts[_EDGE:][-_EDGE:]
        # The longest first: of phrases in the same completions it says most
        for n in (4, 3, 2, 1):
            for at in range(len(parts) - n + 1):
                phrase = " ".join(parts[at : at + n])
                row[f"phrase:{phrase}"] = 1.0
        rows.append(row)
    return rows


def _parts(text: str) -> list[str]:
    return [part[:_LETTERS] for word in words_of(text.casefold()) for part in _PARTS.findall(word)]


class Sums:
    """
    Hold the sums over rollouts that `reward_attribution` reads, in constant memory.

    A rollout's completions to the same prompt form a group. Effects are measured within groups or, if groups have
    fewer than two completions on average, within the rollout. Standard errors treat groups, not completions, as
    independent, since completions of one prompt are alike.

    - `names`: (F) "score" and the F − 1 features that are tracked. x has a completion's values of these
    - `gram`: (F, F) Σ x̃ x̃ᵀ over all completions, where x̃ is x minus its mean in the group, or in the rollout
    - `free`: degrees of freedom of `gram`
    - `between`: (F) sum of the squared distances of the groups' means from the weighted mean of the earlier rollouts;
      in the first rollout, from its own mean
    - `first`: dict from a name to its Σ x over the first rollouts, also for phrases that are not tracked
    - `begin`: number of completions in the first rollouts
    - `now`: (F) weighted Σ x. Each rollout of 16 or more completions halves the weights of the rollouts before it
    - `newest`: (2) sum of all completions' weights, and sum of their squares
    - `rollouts`, `count`, `groups`: numbers of rollouts, completions and groups so far

    The first rollouts are those until there are 32 completions. The score and the features in `FIXED` are always
    tracked; phrases fill the rest of at most 160 names. A phrase is a candidate once 5 % of a rollout's completions,
    and at least three, have it. Those candidates are tracked whose share of completions has changed most since the
    first rollouts. Before a phrase is tracked, its share counts as unchanged.

    Args:
        saved: the result of `dump`, to resume; None for new sums.
    """

    def __init__(self, saved: dict[str, Any] | None = None) -> None:
        self.names = ["score", *FIXED]
        self.first = dict[str, float]()
        size = len(self.names)
        self.gram = np.zeros((size, size))
        self.newest = np.zeros(2)
        self.between, self.now = np.zeros((2, size))
        self.free = self.begin = self.rollouts = self.count = self.groups = 0
        for name, each in (saved or {}).items():
            setattr(self, name, np.array(each) if isinstance(getattr(self, name), np.ndarray) else each)

    def dump(self) -> dict[str, Any]:
        """Return all sums as lists and numbers; `Sums(saved)` restores them exactly."""
        return {name: each.tolist() if isinstance(each, np.ndarray) else each for name, each in vars(self).items()}

    def start(self, names: Sequence[str]) -> np.ndarray:
        """Return the mean of each of F features (`names`) in the first rollouts: (F,)."""
        return np.array([self.first.get(name, 0.0) for name in names]) / self.begin

    def add(self, rows: list[dict[str, float]], scores: Sequence[float], groups: Sequence[str]) -> None:
        """
        Add a rollout.

        Args:
            rows: (N) features of each completion, from `features_of`.
            scores: (N) finite scores.
            groups: (N) the prompt of each completion.
        """
        shares = Counter(name for row in rows for name in row if name not in FIXED)
        rows = [{"score": score, **row} for score, row in zip(scores, rows, strict=True)]
        if self.count < 32:  # more than are tracked, since any phrase may spread later
            self.begin += len(rows)
            for name in ("score", *FIXED, *(name for name, _ in shares.most_common(_FIRST))):
                total = sum(row.get(name, 0.0) for row in rows)
                self.first[name] = self.first.get(name, 0.0) + total
        self._track(shares, len(rows))
        x = np.array([[row.get(name, 0.0) for name in self.names] for row in rows])
        _, group, size = np.unique(groups, return_inverse=True, return_counts=True)
        means = np.equal.outer(np.arange(len(size)), group) @ x / size[:, None]
        centre = self.now / self.newest[0] if self.count else means.mean(0)
        self.between += ((means - centre) ** 2).sum(0)
        keep = 1 - 0.5 * min(1, len(x) / 16)
        self.now = keep * self.now + x.sum(0)
        self.newest = np.array([keep, keep**2]) * self.newest + len(x)
        is_within = len(x) >= 2 * len(size)
        centred = x - (means[group] if is_within else x.mean(0))
        self.gram += centred.T @ centred
        self.free += len(x) - (len(size) if is_within else 1)
        self.rollouts += 1
        self.count += len(x)
        self.groups += len(size)

    def _track(
        self,
        shares: Counter[str],  # this rollout's completions with each phrase
        rows: int,  # all of this rollout's completions
    ) -> None:
        """Track the phrases whose share of completions has changed most since the first rollouts."""
        frequent = (name for name, times in shares.most_common() if times >= max(3, rows / 20))
        names = list(dict.fromkeys([*self.names, *frequent]))
        start = self.start(names)
        new = len(names) - len(self.names)
        # Before a phrase is tracked, its share counts as unchanged
        now = np.append(self.now, start[len(self.names) :] * self.newest[0])
        counts = [shares[name] for name in names]
        moved = np.abs((now + counts) / (self.newest[0] + rows) - start)
        moved[: 1 + len(FIXED)] = np.inf  # always tracked
        kept = np.sort(np.argsort(-moved, kind="stable")[:_TRACKED])
        self.names = [names[at] for at in kept]
        self.now = now[kept]
        self.gram = np.pad(self.gram, (0, new))[np.ix_(kept, kept)]
        self.between = np.pad(self.between, (0, new))[kept]


@dataclass
class Paid:
    """
    Describe how much one feature contributes to the rise of the score.

    Args:
        is_expected: whether the reward may rightly pay for it; see [`is_expected`].
        first, now: mean of the feature's values in the first rollouts, and in the newest ones. For a phrase this is
            the share of the completions that have it.
        effect: change of the score when the feature rises by 1, in units of the score.
        error: standard error of `paid`.
        paid: effect × change of the mean, in units of the score.
        part: `paid` ÷ the rise of the score.
    """

    name: str
    is_expected: bool
    first: float
    now: float
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
        """Return whether the feature is one that a completion has or lacks, so that its mean is a share."""
        return not FIXED.get(self.name)

    @property
    def what(self) -> str:
        """Return the feature in words, such as `the phrase 'thank you'`."""
        kind, _, of = self.name.partition(":")
        return f"the {kind} {of!r}" if of else kind

    @property
    def is_bad(self) -> bool:
        """
        Return whether the feature is a sign of reward hacking: the reward pays for it, and it is not expected.

        Changes that good completions may need are no sign: any change of digits or tool calls, and a fall of any other
        feature but length and characters.
        """
        falls = self.now < self.first and self.kind not in ("length", "character")
        return self.paid > 0 and not (falls or self.is_expected or self.name in ("digits", "tool calls"))

    def in_words(self, sigma: float) -> str:
        """Return a line on the feature: its change, and its effect ÷ `sigma`, the scores' standard deviation."""
        moved = f"{self.first:.0%} → {self.now:.0%} of completions"
        each = ""
        if not self.is_share:
            moved = f"{self.first:.3g} → {self.now:.3g} {FIXED[self.name]}"
            each = " each"
        worth = f"worth {self.effect / (sigma or 1):+.2g} σ{each}"
        return f"{self.what[0].upper()}{self.what[1:]}: {moved}, {worth}: {self.part:.0%} of the rise"


class Attribution(NamedTuple):
    """
    Hold what [`reward_attribution`] returns.

    Args:
        rise: how far the mean score has risen since the first rollouts, in units of the score.
        error: the standard error of the rise.
        sigma: the standard deviation of single scores within a prompt, or within a rollout, see [`Sums`].
        paid: the features that explain a part of the rise, the one that explains most first.
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
        expected: features that are selected before others, if they explain 2 % or more; see [`is_expected`].
    """
    start = sums.start(sums.names)
    end = sums.now / sums.newest[0]
    gram = sums.gram
    change = end - start
    weight = sums.count / 4
    ridged = gram + _RIDGE * np.diag(np.diag(gram))
    variance = sums.between / max(sums.groups - 1, 1) * sums.count / sums.groups  # of a completion
    errors = np.sqrt(variance * (1 / sums.begin + sums.newest[1] / sums.newest[0] ** 2))
    moved = (np.abs(change) > _MOVED * errors) & (np.diag(gram) > 0)
    wanted = [is_expected(name, expected) for name in sums.names]
    total = gram[0, 0] + weight * change[0] ** 2

    def fit(chosen: list[int]) -> tuple[float, np.ndarray, np.ndarray]:
        """Fit the scores by the S features `sums.names[chosen]`; return the unexplained share, effects and errors."""
        inverse = np.linalg.inv(ridged[np.ix_(chosen, chosen)])
        effects = inverse @ gram[chosen, 0]
        within = gram[0, 0] - effects @ gram[chosen, 0]
        between = change[0] - effects @ change[chosen]
        unexplained = (within + weight * between**2) / (total or 1)
        # Rounded, so that features that explain the same are tied. The errors, (S,) as the effects, are squared, and
        # still multiplied by the degrees of freedom, `sums.free` − S
        return round(unexplained, 3), effects, max(within, 0) * np.diag(inverse)

    chosen = list[int]()
    left = {*(np.flatnonzero(moved[1:]) + 1).tolist()}
    rest = 1.0
    while total and left and len(chosen) < 6:
        # Expected ones come first; of features that explain the same, one that spreads says most, a character least
        _, lowest, *_, at = min(
            (rest - lowest < _LEAST or not wanted[at], lowest, "character" in sums.names[at], change[at] < 0, at)
            for at in left
            for lowest, *_ in [fit([*chosen, at])]
        )
        if rest - lowest < _LEAST:
            break
        chosen = [*chosen, at]
        rest = lowest
        left = left - {at}
    _, effects, spread = fit(chosen)
    paid = effects * change[chosen]
    of_effects = np.sqrt(spread / max(sums.free - len(chosen), 1))
    error = np.hypot(effects * errors[chosen], change[chosen] * of_effects)
    columns = start[chosen], end[chosen], effects, error, paid, paid / (change[0] or np.inf)
    features = zip(chosen, *columns, strict=True)
    found = [Paid(sums.names[at], wanted[at], *map(float, each)) for at, *each in features]
    found.sort(key=lambda each: -each.paid)
    sigma = np.sqrt(gram[0, 0] / max(sums.free, 1))
    return Attribution(float(change[0]), float(errors[0]), float(sigma), found)


def is_expected(name: str, expected: Sequence[str]) -> bool:
    """
    Return whether `expected` has a feature's `name`, or its kind, which is the part of the name before a colon.

    A phrase is also expected if `expected` has a longer phrase that contains it, or a shorter one that it contains.

    >>> is_expected("phrase:love you", ["length", "phrase:i love you"])
    True
    """
    kind, _, of = name.partition(":")
    words = f" {of} "
    phrases = (f" {' '.join(_parts(each[7:]))} " for each in expected if kind == "phrase" == each.partition(":")[0])
    return name in expected or kind in expected or any(words in each or each in words for each in phrases)
