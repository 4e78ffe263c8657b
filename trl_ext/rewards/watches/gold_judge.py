"""Score evaluation answers by a judge whose scores training never sees."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...runs.jsonl import read_jsonl
from ...runs.needs import columns_of
from ...upstream.names import get_callable_name
from ..checks import check_function
from ..member import HoldsRewards, awaited, log_to
from ..texts import text_of
from .watch import Watch, numbers_of


class GoldJudgeReward(HoldsRewards, Watch):
    """
    Score evaluation rows, and no others, by a judge that training must not see.

    TRL generates the answers, and the trainer logs:

    - `eval_rewards/gold_judge/mean` and `eval_rewards/gold_judge/std`
    - `eval_gold/win_rate`, from the second evaluation on: the share of answers that score higher than the first
      evaluation's answer to the same prompt; a tie counts one half

    Set `eval_on_start=True` so that the first evaluation measures the policy before training, the start policy. The
    greedy answers in [`~trl_ext.PPOTrainer`]'s evaluation are scored, but are left out of the win rate.

    Args:
        judge: a reward function, async or not. It gets only the rows to score, with their columns.
        column: a true value in this column marks a row to score. Only the evaluation set should have the column:
            `eval_dataset.add_column("held_out", [True] * len(eval_dataset))`
        folder: see [`Watch`]. The start policy's answers and scores are also written there, so that a resumed run
            compares with them, too.
        score: score of the rows that are not marked, see [`Watch`].

    Examples:
        >>> from trl_ext.rewards import GoldJudgeReward
        >>> def gold(completions, **kwargs):
        ...     return [float("thank" in text) for text in completions]
        >>> reward = GoldJudgeReward(gold)
        >>> reward(prompts=["Tea?"] * 2, completions=["No, thank you.", "No."], held_out=[True, None])
        [1.0, None]
    """

    __name__ = "gold_judge"

    def __init__(self, judge: Any, column: str = "held_out", **kwargs: Any):
        check_function(judge=judge)
        super().__init__(**kwargs)
        self.judge = judge
        self.column = column
        self._run = time.time()
        self._start_step: int | None = None
        self._start: dict[str, list[float]] = {}  # prompt → scores of the start policy's answers

    def lacks(self, trainer: Any) -> Iterator[str]:
        """Yield a warning if no data set of the trainer has the column that marks the rows to score."""
        found = [columns_of(getattr(trainer, name, None)) for name in ("eval_dataset", "train_dataset")]
        if None not in found and not any(self.column in columns for columns in found if columns):
            yield (
                f"GoldJudgeReward scores no row: the evaluation set has no column `{self.column}`. Add it, true in "
                f"the rows to score: `eval_dataset.add_column({self.column!r}, [True] * len(eval_dataset))`."
            )

    def __call__(
        self, prompts: list, completions: list, log_metric: Any = None, trainer_state: Any = None, **kwargs: Any
    ) -> list[float | None]:
        marks = kwargs.get(self.column) or [False] * len(prompts)
        rows = [i for i, mark in enumerate(marks) if mark]
        scores: list[float | None] = [self.score] * len(prompts)
        if not rows:
            return scores
        columns = {k: [v[i] for i in rows] for k, v in kwargs.items() if isinstance(v, list) and len(v) == len(marks)}
        asked, answers = [prompts[i] for i in rows], [completions[i] for i in rows]
        arguments = {"trainer_state": trainer_state, "log_metric": log_metric, **columns}
        judged = numbers_of(awaited(self.judge(prompts=asked, completions=answers, **arguments)))
        if len(judged) != len(rows):
            raise ValueError(
                f"{get_callable_name(self.judge)} returned {len(judged)} scores for {len(rows)} rows; return one for "
                "each row"
            )
        step = getattr(trainer_state, "global_step", 0)
        if self._start_step is None:
            self._start_step = step if step == 0 else self._read_start(step)
        wins: list[float] = []
        is_greedy = bool(kwargs.get("is_greedy"))
        for prompt, answer, score in zip(asked, answers, judged, strict=True):
            key = json.dumps(prompt, ensure_ascii=False, default=str)
            if score is None or is_greedy:
                continue
            if step == self._start_step:
                self._start.setdefault(key, []).append(score)
                row = {"run": self._run, "step": step, "prompt": key, "completion": text_of(answer), "score": score}
                self.write("gold_start", [row])
            else:
                wins += [0.5 * ((score > old) + (score >= old)) for old in self._start.get(key, [])]
        if wins:
            log_to(log_metric, {"gold/win_rate": sum(wins) / len(wins)})
        for i, score in zip(rows, judged, strict=True):
            scores[i] = score
        self.write_completions(asked, answers, list(judged), trainer_state)
        return scores

    def _read_start(self, step: int) -> int:
        """
        Read the start policy's scores that an interrupted run wrote to the folder.

        Return the step of that run's first evaluation, or `step` if nothing was written.
        """
        folder = self.folder if self.folder is not None else Watch.default_folder
        for path in sorted(Path(folder).glob("gold_start.rank*.jsonl")) if folder is not None else ():
            rows = list(read_jsonl(path))
            for row in rows:
                if row["run"] == rows[-1]["run"]:  # earlier runs in the same folder wrote to the same file
                    self._start.setdefault(row["prompt"], []).append(float(row["score"]))
                    step = min(step, row["step"])
        return step
