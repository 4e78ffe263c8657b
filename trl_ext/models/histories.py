"""Keep the keys and values of each episode's tokens, so that the model reads only the new tokens of the next turn."""

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer


@dataclass(frozen=True)
class History:
    """
    Hold those tokens of a row that the model has read, with their keys and values.

    Args:
        ids: the row's first L tokens, without padding.
        layers: for each layer its keys and its values, (heads, L, D) each.
    """

    ids: list[int]
    layers: list[tuple[Tensor, Tensor]]

    @classmethod
    def of(cls, cache: DynamicCache, ids: Tensor, row: int, start: int, stop: int) -> "History":
        """Copy columns `start` to `stop` of row `row`, from the (B, W) ids and from their cache."""
        layers = [
            (layer.keys[row, :, start:stop].clone(), layer.values[row, :, start:stop].clone())
            for layer in cache.layers
        ]
        return cls(ids[row, start:stop].tolist(), layers)


class Histories:
    """
    Keep the histories of rows, and find the one that a prompt of the next turn begins with.

    Args:
        limit: largest number of rows to keep. They take no more memory than the cache of a batch of `limit` rows.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._kept: deque[History] = deque()

    @staticmethod
    def can_keep(cache: DynamicCache) -> bool:
        """Return whether each layer of the cache has the keys and values of all tokens, not only of a window."""
        return all(type(layer) is DynamicLayer for layer in cache.layers)

    def add(self, histories: dict[int, History]) -> None:
        """Store histories in the order of their keys, the row numbers; once `limit` are stored, store no more."""
        rows = sorted(histories)[: max(0, self.limit - len(self._kept))]
        self._kept.extend(histories[row] for row in rows)

    def fill(self, cache: DynamicCache, input_ids: Tensor, attention_mask: Tensor) -> None:
        """
        Move the stored keys and values of the prompts `input_ids` into the empty `cache`.

        The model then reads equally many columns of each row, as many as the row with the most new tokens needs. So a
        row with fewer new tokens reads some of its known tokens again.

        Args:
            input_ids, attention_mask: (B, P), left-padded.
        """
        width, lengths = input_ids.size(1), attention_mask.sum(1).tolist()
        found = [self._take(row[width - length :]) for row, length in zip(input_ids.tolist(), lengths, strict=True)]
        new = max(length - (len(known.ids) if known else 0) for length, known in zip(lengths, found, strict=True))
        some = next(filter(None, found), None)
        if some is None or new >= width:
            return
        for number in range(len(some.layers)):
            rows = [
                [
                    pad(each[:, : max(length - new, 0)], (0, 0, min(width - length, width - new), 0))
                    for each in (known or some).layers[number]
                ]
                for length, known in zip(lengths, found, strict=True)
            ]
            cache.update(*(torch.stack(each) for each in zip(*rows, strict=True)), number)

    def _take(self, ids: list[int]) -> History | None:
        """
        Return the first stored history that `ids` begin with; None if there is none.

        Delete this history from the store. Also delete the histories stored before it: their rows have ended.
        """
        for number, history in enumerate(self._kept):
            if ids[: len(history.ids)] == history.ids:
                for _ in range(number + 1):
                    self._kept.popleft()
                return history
        return None
