"""Reward short stories for a happy tone, which only real sentences can earn, and guard against loops."""

import re

from trl_ext.rewards import GoldJudgeReward

# One entry a word that a child's story uses for something good; inflections count as the same word.
HAPPY_WORDS = {
    form: forms[0]
    for forms in (
        ("happy", "happily"),
        ("smile", "smiles", "smiled", "smiling"),
        ("laugh", "laughs", "laughed", "laughing"),
        ("love", "loves", "loved", "loving"),
        ("hug", "hugs", "hugged", "hugging"),
        ("thank", "thanks", "thanked", "thankful"),
        ("friend", "friends"),
        ("fun",),
        ("proud",),
        ("glad",),
        ("excited", "exciting"),
        ("great",),
        ("kind", "kindness"),
        ("share", "shares", "shared", "sharing"),
        ("help", "helps", "helped", "helpful"),
        ("safe",),
        ("nice",),
        ("good", "better", "best"),
        ("yay",),
        ("beautiful",),
    )
    for form in forms
}
ENOUGH = 4  # fresh happy sentences for the full score


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z']+", text.lower())


def happy_sentence_reward(completions: list[str], **kwargs) -> list[float]:
    """Count the sentences with a happy word that was not used before; return a score in [0, 1], 1 for `ENOUGH` of
    them.

    A sentence must end, have 4 to 20 words, and counts once. So neither a list of happy words nor one word repeated
    earns more than a single sentence does.
    """
    return [_happy_sentences(completion) / ENOUGH for completion in completions]


def _happy_sentences(completion: str) -> int:
    used: set[str] = set()
    count = 0
    for sentence in re.findall(r"[^.!?]+(?=[.!?])", completion):
        words = _words(sentence)
        fresh = {HAPPY_WORDS[word] for word in words if word in HAPPY_WORDS} - used
        if fresh and 4 <= len(words) <= 20:
            count += 1
            used |= fresh
    return min(count, ENOUGH)


def repetition_reward(completions: list[str], **kwargs) -> list[float]:
    """Return minus the share of three-word sequences that occurred before, in (-1, 0]."""
    rewards = []
    for completion in completions:
        words = _words(completion)
        trigrams = list(zip(words, words[1:], words[2:], strict=False))
        rewards.append(len(set(trigrams)) / len(trigrams) - 1 if trigrams else 0.0)
    return rewards


def story_quality(completions: list[str], **kwargs) -> list[float]:
    """Score happy sentences minus repetition, the quality that ppo_monitored.yaml measures but does not train on."""
    pairs = zip(happy_sentence_reward(completions), repetition_reward(completions), strict=True)
    return [happy + loops for happy, loops in pairs]


gold_judge = GoldJudgeReward(story_quality)
