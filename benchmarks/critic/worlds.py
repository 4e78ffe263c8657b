"""Small worlds whose best score is known, and a model that has imitated a poor player there. Nothing is downloaded."""

import random
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ANSWERS = 64  # of a rollout


@dataclass
class Chain:
    """
    Answer each symbol by its successor, `length` times. The score is the share of tokens that are right.

    Args:
        length: tokens of an answer.
        flips: how often a score s is reported as 1 − s.
        is_dense: whether each token gets a score of its own, not the answer as a whole.
        seed: decides which symbol succeeds which, and the flips.
    """

    length: int = 32
    flips: float = 0.0
    is_dense: bool = False
    seed: int = 0

    symbols = [f"s{i}" for i in range(12)]
    words = symbols
    skill = 0.4  # share of tokens that are right by habit of the player; the rest are drawn
    best = 1.0

    def __post_init__(self):
        shuffled = random.Random(self.seed).sample(range(len(self.symbols)), len(self.symbols))
        self.successor = dict(zip(shuffled, [*shuffled[1:], shuffled[0]], strict=True))
        self._draw = random.Random(self.seed + 1)

    @property
    def tokens(self) -> int:
        return self.length

    def prompts(self) -> list[str]:
        return self.symbols

    def is_right(self, prompt: str, ids: list[int]) -> list[bool]:
        """Return for each of an answer's token ids whether it is the successor of the one before."""
        before = [self.words.index(prompt), *(i - FIRST for i in ids)]
        return [self.successor.get(a) == b for a, b in zip(before, before[1:], strict=False)]

    def drawn(self, ids: list[int]) -> int:
        """Return how many tokens of an answer the policy has drawn."""
        return len(ids)

    def scores(self, prompts: list[str], ids: list[list[int]], **_: Any) -> list[float]:
        """Return the true scores."""
        return [sum(self.is_right(*each)) / self.length for each in zip(prompts, ids, strict=True)]

    def told(self, prompts: list[str], ids: list[list[int]], scores: list[float], by_token: bool) -> list:
        """Return the scores to train on: by token if `is_dense` and `by_token`, else some of them flipped."""
        if self.is_dense and by_token:
            return [[x / self.length for x in self.is_right(*each)] for each in zip(prompts, ids, strict=True)]
        return [1 - score if self._draw.random() < self.flips else score for score in scores]

    def demonstrations(self, draw: random.Random) -> tuple[list[int], list[bool]]:
        """Return the token ids of a poor player's answer after its prompt, and which of them to imitate."""
        now = draw.randrange(len(self.symbols))
        ids = [now]
        for _ in range(self.length):
            now = self.successor[now] if draw.random() < self.skill else draw.randrange(len(self.symbols))
            ids.append(now)
        return [FIRST + i for i in ids], [False] + [True] * self.length


@dataclass
class Lake:
    """
    Walk over slippery ice to the gift: a turn is one token of the policy, and one that says where it has slid to.

    Args:
        start: the first place, or None for one that each episode draws.
        seed: decides slips and starts.
    """

    start: int | None = 0
    seed: int = 0

    ice = "SFFFFHFHFFFHHFFG"  # Gymnasium's FrozenLake, 4 × 4
    moves = [(0, -1), (1, 0), (0, 1), (-1, 0)]  # left, down, right, up
    turns = 16
    slips = 0.2  # half of them to either side
    skill = 0.3  # share of moves by habit of the player that are the best; the rest are drawn
    words = [f"p{i}" for i in range(16)] + ["left", "down", "right", "up", "walk"]

    def __post_init__(self):
        self._draw = random.Random(self.seed + 1)

    @property
    def tokens(self) -> int:
        return 2 * self.turns

    def prompts(self) -> list[str]:
        return ["walk"] * ANSWERS

    def outcomes(self, place: int, action: int) -> list[tuple[float, int]]:
        """Return (probability, place) for each next place; an action that is no move stays where it is."""
        row, column = divmod(place, 4)
        if action not in range(4):
            return [(1.0, place)]
        found = []
        for turn, probability in ((0, 1 - self.slips), (1, self.slips / 2), (3, self.slips / 2)):
            down, right = self.moves[(action + turn) % 4]
            next_row, next_column = min(max(row + down, 0), 3), min(max(column + right, 0), 3)
            found.append((probability, 4 * next_row + next_column))
        return found

    @cached_property
    def values(self) -> list[list[float]]:
        """Return the best chance of the gift with n moves left, for n = 0 … `turns`, at each place."""
        values = [[float(kind == "G") for kind in self.ice]]
        for _ in range(self.turns):
            last = values[-1]
            values.append(
                [
                    last[place]
                    if self.ice[place] in "GH"
                    else max(sum(p * last[to] for p, to in self.outcomes(place, a)) for a in range(4))
                    for place in range(16)
                ]
            )
        return values

    @cached_property
    def starts(self) -> list[int]:
        return [i for i, kind in enumerate(self.ice) if kind in "SF"] if self.start is None else [self.start]

    @property
    def best(self) -> float:
        """Return the score of the best policy."""
        return sum(self.values[-1][place] for place in self.starts) / len(self.starts)

    def step(self, place: int, action: int, draw: random.Random) -> int:
        """Return where an action leads."""
        odds = self.outcomes(place, action)
        return draw.choices([to for _, to in odds], [p for p, _ in odds])[0]

    def drawn(self, ids: list[int]) -> int:
        """Return how many tokens of an episode the policy has drawn: every other one, from the first on."""
        return (len(ids) + 1) // 2

    def scores(self, prompts: list[str], ids: list[list[int]], won: list[bool], **_: Any) -> list[float]:
        return [float(x) for x in won]

    def told(self, prompts: list[str], ids: list[list[int]], scores: list[float], by_token: bool) -> list:
        return scores

    @torch.no_grad()
    def play(self, policy: Any, count: int, tokenizer: PreTrainedTokenizerFast) -> dict[str, list]:
        """Play episodes with a policy, all in step; return what TRL wants of a `rollout_func`."""
        walk = tokenizer.convert_tokens_to_ids("walk")
        places = [self._draw.choice(self.starts) for _ in range(count)]
        prompts, answers = [[walk, FIRST + place] for place in places], [[] for _ in range(count)]
        logprobs, masks = [[] for _ in range(count)], [[] for _ in range(count)]
        read, cache, is_over = torch.tensor(prompts), None, [False] * count
        for _ in range(self.turns):
            output = policy(input_ids=read, past_key_values=cache, use_cache=True)
            cache, odds = output.past_key_values, output.logits[:, -1].float().log_softmax(-1)
            drawn = odds.exp().multinomial(1)
            chances = odds.gather(1, drawn)[:, 0].tolist()
            for row, token in enumerate(drawn[:, 0].tolist()):
                if is_over[row]:
                    continue
                if answers[row]:  # where the last move led is read before the next one
                    answers[row].append(FIRST + places[row])
                    logprobs[row].append(0.0)
                    masks[row].append(0)
                places[row] = self.step(places[row], token - FIRST - 16, self._draw)
                answers[row].append(token)
                logprobs[row].append(chances[row])
                masks[row].append(1)
                is_over[row] = self.ice[places[row]] in "GH"
            if all(is_over):
                break
            read = torch.cat([drawn, torch.tensor(places)[:, None] + FIRST], dim=1)
        won = [self.ice[place] == "G" for place in places]
        return {
            "prompt_ids": prompts, "completion_ids": answers, "logprobs": logprobs, "env_mask": masks, "won": won
        }  # fmt: skip

    def demonstrations(self, draw: random.Random) -> tuple[list[int], list[bool]]:
        """Return the token ids of a poor player's episode after its prompt, and which of them to imitate."""
        place = draw.choice([i for i, kind in enumerate(self.ice) if kind in "SF"])
        ids, imitated = [FIRST + self.words.index("walk"), FIRST + place], [False, False]
        for left in range(self.turns, 0, -1):
            values = self.values[left - 1]
            action = draw.randrange(4)
            if draw.random() < self.skill:
                action = max(range(4), key=lambda a: sum(p * values[to] for p, to in self.outcomes(place, a)))
            place = self.step(place, action, draw)
            ids, imitated = [*ids, FIRST + 16 + action, FIRST + place], [*imitated, True, False]
            if self.ice[place] in "GH":
                break
        return ids, imitated


MARKS = ["<pad>", "</s>"]
FIRST = len(MARKS)  # id of a world's first word
World = Chain | Lake


def make_tokenizer(world: World) -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {word: i for i, word in enumerate([*MARKS, *world.words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", padding_side="left"
    )


def make_model(world: World, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(world.words) + FIRST,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=world.tokens + 8,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config)


def imitate(world: World, seed: int, steps: int = 80, tokens: int = 1024) -> LlamaForCausalLM:
    """Return a model that has imitated the world's poor player."""
    model, draw = make_model(world, seed), random.Random(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(steps):
        rows = [world.demonstrations(draw) for _ in range(max(tokens // world.tokens, 8))]
        width = max(len(ids) for ids, _ in rows)
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        labels = torch.full_like(ids, -100)
        for row, (tokens_of_row, imitated) in enumerate(rows):
            ids[row, : len(tokens_of_row)] = torch.tensor(tokens_of_row)
            chosen: Tensor = torch.tensor(imitated)
            labels[row, : len(tokens_of_row)][chosen] = torch.tensor(tokens_of_row)[chosen]
        model(input_ids=ids, attention_mask=(ids != 0).long(), labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def start_of(world: World, seed: int, folder: Path) -> LlamaForCausalLM:
    """Return the model that has imitated the poor player; it is made once for a kind of world, a length and a seed."""
    file = folder / f"{type(world).__name__.lower()}-{world.tokens}-{seed}.pt"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".partial")
        torch.save(imitate(world, seed).state_dict(), partial)
        partial.replace(file)
    model = make_model(world, seed)
    model.load_state_dict(torch.load(file, weights_only=True))
    return model
