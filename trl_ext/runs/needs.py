"""Warn before training of monitors and watches that lack what they need to find anything."""

from typing import Any

from transformers.utils import logging

logger = logging.get_logger(__name__)


def check_monitors(trainer: Any) -> list[str]:
    """
    Warn of monitors and watches that will have nothing to look at, and return the warnings as sentences.

    Each callback and reward function that has a method `lacks(trainer)` is asked; the method yields sentences. Each
    sentence is logged only once for a trainer.

    Our trainers call this when they are built and when they begin to train; recipes call it when they attach monitors.
    In a script with a stock trainer, call it before `train()`.
    """
    parts = [*trainer.callback_handler.callbacks, *rewards_of(trainer)]
    said = [sentence for part in parts if hasattr(part, "lacks") for sentence in part.lacks(trainer)]
    told = vars(trainer).setdefault("_told_to_lack", set())
    for sentence in said:
        if sentence not in told and trainer.args.process_index == 0:
            logger.warning(sentence)
    told.update(said)
    return said


def rewards_of(trainer: Any) -> list[Any]:
    """Return the reward functions that a trainer was given; [] for a trainer without rewards."""
    return [vars(each).get("function", each) for each in getattr(trainer, "reward_funcs", None) or []]


def columns_of(dataset: Any) -> set[str] | None:
    """
    Return the names of a data set's columns or, for a dict of data sets, the names of all their columns.

    Return None if a data set is a stream that does not know its columns.
    """
    parts = list(dataset.values()) if isinstance(dataset, dict) else [dataset]
    names: list[Any] = [getattr(part, "column_names", None) for part in parts if part is not None]
    return None if None in names else {name for each in names for name in each}
