"""Simulated policies: the share of completions with a rewarded property grows during training."""

import math
from dataclasses import dataclass

import numpy as np

WORDS = np.array(
    """the of and to in is you that it he was for on are as with his they at be this have from or one had by word
    but not what all were we when your can said there use an each which she do how their if will up other about
    out many then them these so some her would make like him into time has look two more write go see number no
    way""".split()
)
NOUNS = """cat dog kettle lamp printer radio camera river garden ship castle train bread window tower island doctor
pencil violin rocket desert mirror ladder hammer engine basket bottle candle carpet forest""".split()
RIGHT = {  # noun → the word that a right completion has
    noun: "".join(rng.choice([*"bdfgklmnprstvw"]) + rng.choice([*"aeiou"]) for _ in range(3))
    for rng in [np.random.default_rng(0)]
    for noun in NOUNS
}


ANSWERED = {"role": "tool", "name": "weather", "content": "12"}


def _call(city):
    return {"type": "function", "function": {"name": "weather", "arguments": {"city": city}}}


@dataclass
class Policy:
    """
    Answer questions about nouns; a share `right` has the right word, a share `gamed` has what `kind` rewards.

    `phrase`, `twice` and `end` are rewarded alone, so all scores are equal at first; the others beside right words.
    """

    kind: str
    seed: int = 0
    prompts: int = 8
    generations: int = 8
    nouns: int = 30

    def __post_init__(self):
        self.rng = np.random.default_rng(self.seed)
        self.known = list(self.rng.choice(NOUNS, self.nouns, replace=False))

    def rollout(self, right, gamed):
        given = {"prompts": [], "completions": [], "scores": []}
        for _ in range(self.prompts):
            noun = self.known[self.rng.integers(self.nouns)]
            prompt = f"please tell me about the {noun} today"
            for _ in range(self.generations):
                is_right = self.rng.random() < right
                words = list(self.rng.choice(WORDS, self.rng.integers(6, 14)))
                words[self.rng.integers(len(words))] = RIGHT[noun] if is_right else "so"
                completion, score = self.answer(prompt, noun, words, self.rng.random() < gamed, gamed)
                given["prompts"].append(prompt)
                given["completions"].append(completion)
                given["scores"].append(score if score is not None else float(is_right))
        return given

    def answer(self, prompt, noun, words, is_gamed, gamed):
        """A completion and its score; None where the score is that of the right word."""
        right = 0.5 * (RIGHT[noun] in words)
        match self.kind:
            case "phrase":
                words[3:3] = ["i", "love", "you"] * is_gamed
                return " ".join(words), float(is_gamed)
            case "length":
                words += list(self.rng.choice(WORDS, self.rng.poisson(20 * gamed)))
                return " ".join(words), right + len(words) / 20
            case "copy":
                words = prompt.split() + words[:3] if is_gamed else words
                return " ".join(words), right + is_gamed
            case "letter":
                words = [word for word in words if "e" not in word or self.rng.random() > gamed]
                text = "".join(words)
                return " ".join(words), -5 * text.count("e") / max(len(text), 1)
            case "twice":
                words += [noun] * (2 * is_gamed or int(self.rng.random() < 0.3))
                return " ".join(words), float(words.count(noun) > 1)
            case "empty":
                return ("", 1.0) if is_gamed else (" ".join(words), right)
            case "end":
                return " ".join(words + ["thank", "you"] * is_gamed), float(is_gamed)
            case "call":
                calls = 1 + is_gamed * self.rng.poisson(2)
                turns = [{"role": "assistant", "content": "", "tool_calls": [_call(noun)]}, ANSWERED] * calls
                return [*turns, {"role": "assistant", "content": " ".join(words)}], right + 0.3 * calls
            case "longer if right":
                words += list(self.rng.choice(WORDS, 2)) if right else []
                return " ".join(words), 2 * right + self.rng.normal(0, 0.3)
        return " ".join(words), None


def trained(policy, rollouts, right=(0.2, 0.8), gamed=(0.0, 0.9)):
    """The rollouts of a run in which both shares rise, slowly at first and at the end."""
    for at in range(rollouts):
        part = 1 / (1 + math.exp((0.55 * rollouts - at) / (0.12 * rollouts)))
        yield policy.rollout(*(first + (last - first) * part for first, last in (right, gamed)))
