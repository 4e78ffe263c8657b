"""What a callback asks of the Trainer on one process, all processes do."""

from typing import Any

import torch

_REQUESTS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")


class AgreedControl:
    """
    Mixin of trainers: requests in [`~transformers.TrainerControl`] that one process's callbacks make at the end of a
    step or an epoch are carried out by all, at that step. (A time limit that runs out on one process first would leave
    the others waiting in the next collective forever.) Of those made while logging, saving or evaluating, stops are.
    """

    accelerator: Any
    control: Any

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        is_asked = self._agree()
        super()._maybe_log_save_evaluate(*args, **kwargs)  # type: ignore[misc]
        if is_asked:
            self._agree()

    def _agree(self) -> bool:
        """Whether there is a request, now of all processes."""
        asked = [getattr(self.control, name) for name in _REQUESTS]
        if self.accelerator.num_processes > 1:
            everyones = torch.tensor(asked, dtype=torch.int32, device=self.accelerator.device)
            asked = (self.accelerator.reduce(everyones, reduction="sum") > 0).tolist()
            for name, value in zip(_REQUESTS, asked, strict=True):
                setattr(self.control, name, value)
        return any(asked)
