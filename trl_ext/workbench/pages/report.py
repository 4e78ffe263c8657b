"""Write one self-contained HTML page of a run, or of several.

    trl-ext report RUN [RUN …] [--output_file PAGE.html] [--evaluation FILE]

RUN is an output directory. These files in it are read:

- `metrics.rank0.jsonl`, which JSONLCallback writes: the curves, and in its `begin` lines the configuration. Without
  this file the curves come from the newest `trainer_state.json`.
- `alerts.jsonl`: the alerts.
- `completions.rank*.jsonl`, which SamplesCallback and the watches of `trl_ext.rewards` write: score histograms and
  samples.
- `attribution.json`, `round.json` and `reward_report.json`: what HackWatch, a round of online DPO, and a reward report
  found.

If several runs wrote into the folder, the page shows the last one. A step that a resumed run repeated is shown once.

`page.py` makes the page of one run. `compare.py` makes the page of several: a colour for each run, the settings that
differ, and the answers to the same prompts. `--evaluation` adds the figures that `trl-ext evaluate` found.
"""

if __name__ == "__main__":  # before the libraries that are imported next
    from ...upstream import quiet

    quiet()

import argparse
import json
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...runs import PRIVATE_FOLDER, write_text
from .compare import comparison, evaluation_rows, named, of_runs
from .page import page
from .recorded import read_run, rounds_of

if TYPE_CHECKING:
    from datasets import Dataset

_says_next = ContextVar("_says_next", default=True)


def write_report(
    folder: str | Path | Sequence[str | Path],
    output: str | Path | None = None,
    evaluation: str | Path | None = None,
) -> Path:
    """
    Write the page of a run, or one page of several runs, and return its path.

    Args:
        folder: output directory of a run, or several directories for a comparison. The folder of an online DPO run
            gives a comparison of its rounds.
        output: file to write. The default for one folder is `report.html` in it (in its subfolder `_run`, if there is
            one); for several it is `comparison.html` in the innermost folder that holds all of them.
        evaluation: the `evaluation.json` of `trl-ext evaluate`, or its folder.

    Raises:
        ValueError: a folder holds no run, or the evaluation has no figures of any of the runs.
    """
    given = [Path(folder)] if isinstance(folder, (str, Path)) else [*map(Path, folder)]
    folders = named([run for one in given for run in rounds_of(one)])
    runs = {name: read_run(each) for name, each in folders.items()}
    private = given[0] / PRIVATE_FOLDER
    place = (private if private.is_dir() else given[0]) / "report.html"
    if len(given) > 1:
        common = os.path.commonpath([path.resolve() for path in given])
        place = Path(os.path.relpath(common)) / "comparison.html"
    file = Path(evaluation or "")
    file = file / "evaluation.json" if file.is_dir() else file
    found = json.loads(file.read_text(encoding="utf-8")) if evaluation else None
    if found and not of_runs(found, runs):
        policies = ", ".join(f"{name} ({of['policy']})" for name, of in found["policies"].items())
        raise ValueError(
            f"{file} has no figures of {', '.join(runs)}, only of {policies}: run `trl-ext evaluate` on the runs"
        )
    if len(runs) == 1:
        (run,) = runs.values()
        text = page(run, found, evaluation_rows([*found["policies"].values()]) if found else ())
    else:
        title = " · ".join(runs) if len(given) > 1 else given[0].resolve().name
        text = comparison(runs, title, found)
    output = Path(output) if output else place
    write_text(output, text)
    return output


def report_of(folder: str | Path, was_trained: bool = True, is_recorded: bool = True) -> str:
    """
    Write a run's page at the end of a script, and return a line that says where the page is.

    If the page cannot be written, the line says why; nothing is raised. All processes but the main one return "".

    Args:
        folder: output directory of the run.
        was_trained: False if the run was complete before the script started. Its page is then not written again.
        is_recorded: the setting `record_run`. If it is False, no page is written.
    """
    from accelerate import PartialState  # here: it imports torch, which a page does not need

    if not PartialState().is_main_process:
        return ""
    if not is_recorded:
        return "No report: `record_run` is false"
    if not was_trained:
        found = sorted(Path(folder).glob("report.html")) + sorted(Path(folder).glob(f"{PRIVATE_FOLDER}/report.html"))
        return f"Report: {found[-1]}" if found else "No report: nothing was trained"
    try:
        return f"Report: {write_report(folder)}"
    except Exception as error:  # the trained model matters more than its page
        return f"No report: {' '.join(str(error).split())}"


def next_line(command: str) -> str:
    """Return the line that a script prints last, with the command to run next; "" within [`without_next`]."""
    return f"\nnext: {command}" if _says_next.get() else ""


@contextmanager
def without_next() -> Iterator[None]:
    """Make [`next_line`] return "" within the `with` block, for a script that runs other scripts."""
    before = _says_next.set(False)
    try:
        yield
    finally:
        _says_next.reset(before)


def next_answer(args: Any, rows: "Dataset", folder: str | Path = "", max_new_tokens: int | None = None) -> str:
    """
    Return a `trl-ext generate` command in which a run's model answers the first short prompt of its training rows.

    Args:
        args: training arguments of the run.
        rows: training rows of the run. If none of the first 100 has a short prompt, the prompt is `hello`.
        folder: where the model is, by default the run's `output_dir`.
        max_new_tokens: longest answer, in tokens; None takes the default of `trl-ext generate`.
    """
    from ...data import is_messages

    is_chat = False
    prompt = "hello"
    for row in rows.select(range(min(len(rows), 100))):
        asked = row.get("prompt", row.get("messages"))
        if is_chat := is_messages(asked):
            asked = next((message["content"] for message in asked if message["role"] == "user"), None)
        if isinstance(asked, str) and 0 < len(asked.strip()) <= 120 and asked.isprintable():
            prompt = asked
            break
    model = shlex.quote(str(folder or args.output_dir))
    command = f"trl-ext generate --model_name_or_path {model} --prompt {shlex.quote(prompt)}"
    command += f" --max_new_tokens {max_new_tokens}" if max_new_tokens else ""
    command += " --use_cpu true" if args.use_cpu else ""
    return f"{command} --chat true" if is_chat else command


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "trl-ext report",
        description="One self-contained HTML page of a run, or of several, with their curves over each other.",
    )
    parser.add_argument("run", nargs="+", help="output directory of a run")
    parser.add_argument("--output_file", help="by default report.html in RUN, or comparison.html above all runs")
    parser.add_argument("--evaluation", help="evaluation.json of `trl-ext evaluate`, or its folder")
    args = parser.parse_args(arguments)
    try:
        print(write_report(args.run, args.output_file, args.evaluation))
    except (ValueError, OSError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
