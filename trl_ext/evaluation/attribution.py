"""Say what a reward paid for: cheap features of completions, and the part of the score's rise that each explains."""

import io
import string
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..functional import student_quantile
from .texts import words_of

CHARACTERS = string.ascii_lowercase + "!?.,:;'\"()*#-_"
# Feature of every completion → what it is in words, and its unit
FIXED = {
    "length": ("the length", "words"),
    "empty": ("empty answers", ""),
    "copied": ("copies of the prompt", "% of its pairs of words"),
    "prompt words": ("words of the prompt", "an answer"),
    "prompt word again": ("a word of the prompt repeated", "times an answer"),
    "repeated": ("repetition", "% of the pairs of words"),
    "capitals": ("capital letters", "% of characters"),
    "digits": ("digits", "% of characters"),
    "marks": ("marks of lists or code", "lines an answer"),
    "repeated calls": ("tool calls with the same arguments as an earlier one", "an answer"),
    "calls": ("tool calls", "an answer"),
    **{f"character:{each}": (f"the character {each!r}", "% of characters") for each in CHARACTERS},
}
_TRACKED, _FIRST = 160, 600  # features at most, and those of the first rollouts that are remembered
_LETTERS = 40  # of a word
_EDGE = 256  # words of each end of a completion whose phrases are read
_RIDGE = 1e-3  # of a feature's own variance: features that are the same would have no solution


def features_of(
    prompts: Sequence[str], completions: Sequence[str], calls: Sequence[Sequence[tuple[str, str]]] | None = None
) -> list[dict[str, float]]:
    """
    Return for each completion a mapping from the features that it has to their values.

    The features are those of `FIXED`; `phrase:…`, for each phrase of one to four words the root of how often the
    completion has it, where ^ and $ are its begin and end; and `call:…`, how often it calls a tool. A prompt's own
    words are those that at most half of the rollout's other prompts have.

    Args:
        prompts, completions: (N) texts.
        calls: (N) each completion's tool calls: name and arguments. None for no calls.
    """
    asked = [[_bare(word) for word in words_of(prompt)] for prompt in prompts]
    known = Counter(word for words in set(map(tuple, asked)) for word in set(words))
    half = max(1, len(set(prompts)) // 2)
    rows = []
    for words, text, called in zip(asked, completions, calls or [()] * len(prompts), strict=True):
        answer = [_bare(word) for word in words_of(text)]
        counts, pairs, solid = Counter(answer), list(zip(answer, answer[1:], strict=False)), "".join(text.split())
        own = [counts[word] for word in {*words} if known[word] <= half and counts[word]]
        of_prompt, share = {*zip(words, words[1:], strict=False)}, 100 / max(len(solid), 1)
        lower = solid.casefold()
        row: dict[str, float] = {
            "length": len(answer),
            "empty": not answer,
            "copied": 100 * len(of_prompt & {*pairs}) / max(len(of_prompt), 1),
            "prompt words": min(sum(own), 8),
            "prompt word again": min(max(own, default=1) - 1, 4),
            "repeated": 100 * (1 - len({*pairs}) / max(len(pairs), 1)) if pairs else 0,
            "capitals": sum(map(str.isupper, solid)) * share,
            "digits": sum(map(str.isdigit, solid)) * share,
            "marks": sum(line.lstrip()[:1] in {*"-*#`•"} for line in text.splitlines() if line.strip()),
            "repeated calls": len(called) - len({*called}),
            "calls": len(called),
            **{f"character:{each}": lower.count(each) * share for each in CHARACTERS},
            **Counter(f"call:{name}" for name, _ in called),
        }
        whole = ["^", *answer, "$"]
        ends = [whole] if len(whole) <= 2 * _EDGE else [whole[:_EDGE], whole[-_EDGE:]]
        phrases = Counter(
            gram for part in ends for n in (1, 2, 3, 4) for gram in zip(*(part[i:] for i in range(n)), strict=False)
        )
        del phrases["^",], phrases["$",]
        phrases.pop(("^", "$"), None)  # it is empty
        rows.append(row | {f"phrase:{' '.join(gram)}": min(times, 16) ** 0.5 for gram, times in phrases.items()})
    return rows


def _bare(word: str) -> str:
    word = word.casefold()[:_LETTERS]
    return word.strip(string.punctuation) or word


class Sums:
    """
    Hold the sums over rollouts that `reward_attribution` reads, in constant memory.

    A rollout's completions of one prompt make a group. Effects are measured within groups or, where these have less
    than two completions on average, within the rollout; means and their errors are those of the groups, since answers
    to one prompt are alike.

    - `gram`: Σ x̃ x̃ᵀ over all completions so far, where x has the score and the features, and x̃ is x less its mean in
      the group, or in the rollout; `free`, its degrees of freedom; and `count`, the number of completions
    - `recent`: (3, 3, F), of the newest two or three rollouts, of some ten, and of all: a rollout of 16 completions or
      more counts 0.5, 0.9 or 1 times as much as the next. Of each feature it has the sum over groups of its mean, the
      squares of these means around their rollout's, and the sum of the share of completions that have the feature
    - `first`: (3, F), the same of the first rollouts
    - `weights`: (4, 3), of the first rollouts and of `recent`: the number of groups by these weights, and by their
      squares, and the degrees of freedom of the squares

    The first rollouts are one, or up to four until they have 32 completions and 4 groups. Phrases and calls are
    tracked from the rollout on in which 5 % of the completions have them; before that they count as absent.
    """

    def __init__(self) -> None:
        size = 1 + len(FIXED)
        self.names = ["score", *FIXED]
        self.gram, self.recent, self.weights = np.zeros((size, size)), np.zeros((3, 3, size)), np.zeros((4, 3))
        self.last = np.zeros(size)  # means of the last rollout
        self.known: dict[str, np.ndarray] = {}  # name → its column of `first`
        self.free, self.count, self.rollouts = 0, 0, 0
        self.begins = True  # until the first rollouts are complete

    @property
    def first(self) -> np.ndarray:
        """Return the sums of the first rollouts, in the order of `names`."""
        return np.stack([self.known.get(name, np.zeros(3)) for name in self.names], 1)

    def add(self, rows: list[dict[str, float]], scores: Sequence[float], groups: Sequence[str]) -> None:
        """
        Add a rollout.

        Args:
            rows: (N) features, from `features_of`.
            scores: (N) finite.
            groups: (N) the prompt of each completion.
        """
        _, group = np.unique(groups, return_inverse=True)
        size = np.bincount(group)
        spread = Counter(name for row in rows for name in row.keys() - FIXED.keys())
        self._track(spread, len(rows))
        names = self.names
        if self.begins:  # more than are tracked, since any phrase may spread later
            names = [*dict.fromkeys([*names, *(name for name, _ in spread.most_common(_FIRST))])]
        x = np.array(
            [[score, *(row.get(name, 0.0) for name in names[1:])] for score, row in zip(scores, rows, strict=True)]
        )
        means, shares = (
            np.stack([np.bincount(group, column) / size for column in each.T], 1) for each in (x, (x != 0) * 1.0)
        )
        mean, count = means.mean(0), len(size)
        # Of a rollout with a single group only the difference to the last one tells how groups differ
        squares = ((means - mean) ** 2).sum(0) if count > 1 else (mean - _padded(self.last, mean)) ** 2 / 2
        sums, counts = np.stack([means.sum(0), squares, shares.sum(0)]), np.array([count, count, max(count - 1, 1)])
        if self.begins:
            for name, column in zip(names, sums.T, strict=True):
                self.known[name] = self.known.get(name, 0.0) + column
            self.weights[0] += counts
        keep = 1 - np.array([[0.5], [0.1], [0.0]]) * min(1, len(x) / 16)
        x, means, sums, self.last = (each[..., : len(self.names)] for each in (x, means, sums, mean))
        self.recent = keep[:, None] * self.recent + sums
        self.weights[1:] = np.hstack([keep, keep**2, keep]) * self.weights[1:] + counts
        centred, free = (x - means[group], len(x) - count) if len(x) >= 2 * count else (x - x.mean(0), len(x) - 1)
        self.gram += centred.T @ centred
        self.free, self.count, self.rollouts = self.free + free, self.count + len(x), self.rollouts + 1
        self.begins = self.rollouts < 4 and (self.count < 32 or self.weights[0, 0] < 4)

    def _track(self, spread: Counter[str], rows: int) -> None:
        """Make room for phrases and calls that spread, in place of those that have moved least."""
        frequent = {name for name, times in spread.items() if times >= max(3, rows / 20)}
        within = {  # a longer phrase of the same completions says more
            f"phrase:{part}"
            for name in frequent
            if name.startswith("phrase:")
            for part in (name[7:].partition(" ")[2], name[7:].rpartition(" ")[0])
            if spread[f"phrase:{part}"] <= spread[name]
        }
        first = {name: self.known[name][2] / self.weights[0, 0] if name in self.known else 0.0 for name in frequent}
        new = sorted(
            frequent - within - {*self.names}, key=lambda name: (-abs(spread[name] / rows - first[name]), name)
        )
        now, first_shares = self.recent[0, 2] / max(self.weights[1, 0], 1), self.first[2] / max(self.weights[0, 0], 1)
        moved = np.abs(now - first_shares)
        moved[: 1 + len(FIXED)] = np.inf
        room = _TRACKED - len(self.names)
        leave = {*np.argsort(moved, kind="stable")[: max(0, min(len(new) - room, 40))].tolist()}
        kept = [at for at in range(len(self.names)) if at not in leave or np.isinf(moved[at])]
        new = new[: _TRACKED - len(kept)]
        self.names = [*(self.names[at] for at in kept), *new]
        self.gram = np.pad(self.gram[np.ix_(kept, kept)], (0, len(new)))
        self.recent, self.last = (
            _padded(each[..., kept], np.zeros(len(kept) + len(new))) for each in (self.recent, self.last)
        )

    def dump(self) -> str:
        """Return all sums as text, exactly."""
        file = io.BytesIO()
        arrays = vars(self) | {"known": [*self.known], "first": np.array([*self.known.values()])}
        np.savez_compressed(file, allow_pickle=False, **{name: np.asarray(each) for name, each in arrays.items()})
        return b64encode(file.getvalue()).decode()

    @classmethod
    def load(cls, text: str) -> "Sums":
        """Return the sums that `dump` made a text of."""
        sums = cls()
        with np.load(io.BytesIO(b64decode(text))) as saved:
            found: dict[str, Any] = {name: each if each.ndim else each.item() for name, each in saved.items()}
        found["known"] = dict(zip(found["known"].tolist(), found.pop("first"), strict=True))
        vars(sums).update(found | {"names": found["names"].tolist()})
        return sums


def _padded(array: np.ndarray, like: np.ndarray) -> np.ndarray:
    """Return an array with zeros added to its last axis, so that this has the length of another's."""
    return np.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, like.shape[-1] - array.shape[-1])])


@dataclass
class Paid:
    """
    Say what one feature has to do with the rise of the score.

    Args:
        name: the feature.
        first, now: mean of its values in the first rollouts, or some ten rollouts ago, and in the newest ones.
        first_share, share: share of completions with a value other than 0, then and now.
        effect: what one more of it is worth, in units of the score.
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
        """Return the part of its name before a colon."""
        return self.name.partition(":")[0]

    @property
    def is_share(self) -> bool:
        """Return whether its share says more than the mean of its values."""
        return self.kind in ("phrase", "call", "empty")

    @property
    def what(self) -> str:
        """Return what it is, in words."""
        if self.name in FIXED:
            return FIXED[self.name][0]
        of = self.name.partition(":")[2]
        if self.kind == "call":
            return f"calls of the tool {of!r}"
        where = {(True, True): "the answer", (True, False): "the beginning", (False, True): "the ending"}
        return f"{where.get((of[0] == '^', of[-1] == '$'), 'the phrase')} {of.strip('^$ ')!r}"

    @property
    def has_content(self) -> bool:
        """Return whether good answers may need it: numbers, tool calls, or the lack of what fewer answers have now."""
        falls = self.now < self.first
        return self.kind in ("digits", "calls", "call") or (falls and self.kind not in ("length", "character"))

    def in_words(self, sigma: float) -> str:
        """Say what it is, how it moved, and its effect in σ of single scores."""
        worth = f"worth {self.effect / (sigma or 1):+.2g} σ"
        if self.is_share:
            moved = f"{self.first_share:.0%} → {self.share:.0%} of answers, {worth}"
        else:
            moved = f"{self.first:.3g} → {self.now:.3g} {FIXED[self.name][1]}, {worth} each"
        return f"{self.what}: {moved}: {self.part:.0%} of the rise"


class Attribution(NamedTuple):
    """Hold the rise of the mean score, its standard error, σ of single scores within prompts, and what was paid."""

    rise: float
    error: float
    sigma: float
    paid: list[Paid]


def reward_attribution(
    sums: Sums, expected: Sequence[str] = (), is_recent: bool = False, most: int = 6
) -> Attribution:
    r"""
    Attribute the rise of the mean score to the features that moved with it.

    With Δ the change of means, the effects of the features S are b = (G_SS + 0.001 diag G_SS)⁻¹ G_Sy, the regression
    of scores on features within prompts, or within rollouts. Feature j was paid b_j Δ_j. S grows greedily, as in
    forward selection: each time by the feature that leaves the least of

        G_yy − b·G_Sy + N/4 (Δ_y − b·Δ_S)²,

    which is what b does not explain within rollouts, and between the first and the newest one as if each had half of
    all N completions. So phrases that overlap, and what only goes with a feature that pays, count once. It ends when
    a feature explains less than 2 %. Only features join whose mean moved by more than noise, corrected for their
    number.

    Args:
        sums: the rollouts' sums.
        expected: features that join first, by [`is_expected`].
        is_recent: whether to look at the rise since some ten rollouts ago, in place of that since the first rollouts.
        most: number of features at most.
    """
    first, now = sums.recent[1] if is_recent else sums.first, sums.recent[0]
    weights = np.maximum(sums.weights[[2 if is_recent else 0, 1, 3]], 1e-9)
    start, end = first / weights[0, 0], now / weights[1, 0]
    change, gram = end[0] - start[0], sums.gram
    # A few groups may be alike by chance: another one is added that differs, and the whole run tells more
    squares = (first[1] + now[1] + change**2 / 4) / (weights[:2, 2].sum() + 1)
    squares = np.maximum(squares, sums.recent[2, 1] / weights[2, 2])
    errors = np.sqrt(squares * (weights[:2, 1] / weights[:2, 0] ** 2).sum())
    rise, weight = float(change[0]), sums.count / 4
    moved = np.divide(change, errors, out=np.zeros_like(change), where=errors > 0)
    least = student_quantile(0.05 / len(sums.names), np.inf)
    left = {at for at in range(1, len(sums.names)) if abs(moved[at]) > least and gram[at, at] > 0}

    def inner(chosen: list[int]) -> np.ndarray:
        return gram[np.ix_(chosen, chosen)] + _RIDGE * np.diag(np.diag(gram)[chosen])

    def unexplained(chosen: list[int]) -> tuple[float, np.ndarray]:
        effects = np.linalg.solve(inner(chosen), gram[chosen, 0])
        between = rise - change[chosen] @ effects
        return float(gram[0, 0] - effects @ gram[chosen, 0] + weight * between**2), effects

    chosen: list[int] = []
    total, rest = max(float(gram[0, 0] + weight * rise**2), 1e-30), 1.0
    for candidates in ({at for at in left if is_expected(sums.names[at], expected)}, left):
        while candidates and len(chosen) < most:
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
        spread = residual * np.linalg.inv(inner(chosen))
        for at, effect, variance in zip(chosen, effects, np.diag(spread), strict=True):
            error = np.hypot(effect * errors[at], change[at] * np.sqrt(variance))
            means = start[0, at], end[0, at], start[2, at], end[2, at]
            amount, part = effect * change[at], effect * change[at] / rise if rise else 0.0
            paid.append(Paid(sums.names[at], *map(float, (*means, effect, error, amount, part))))
    return Attribution(rise, float(errors[0]), float(sigma), sorted(paid, key=lambda each: -each.paid))


def is_expected(name: str, expected: Sequence[str]) -> bool:
    """
    Return whether a feature is expected: by its name, by its kind (`phrase`), or as a part of an expected phrase.

    >>> is_expected("phrase:love you $", ["length", "phrase:i love you"])
    True
    """
    kind, _, of = name.partition(":")
    words = " ".join(of.strip("^$ ").split())
    return any(
        each in (name, kind)
        or (kind == "phrase" and each.startswith("phrase:") and _overlap(words, each[7:].casefold()))
        for each in expected
    )


def _overlap(one: str, other: str) -> bool:
    return bool(one) and (f" {one} " in f" {other} " or f" {other} " in f" {one} ")
