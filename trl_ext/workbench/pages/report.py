"""Write one self-contained HTML page of a run, or of several.

    trl-ext report RUN [RUN …] [--output_file PAGE.html] [--x episode] [--evaluation FILE]

RUN is an output directory. Curves come from `metrics.rank0.jsonl` (JSONLCallback) or else from the newest
`trainer_state.json`; alerts from `alerts.jsonl`; score histograms and samples from `completions.rank*.jsonl`, which
SamplesCallback and the watches of `trl_ext.rewards` write; the configuration from JSONLCallback's first line. A folder
with several runs shows the last one. Steps that a resumed run repeated count once.

`page.py` makes the page of one run, and `compare.py` that of several: a colour for each run, the settings that differ,
the answers to the same prompts, and the figures that `trl-ext evaluate` found, of `--evaluation`.
"""

if __name__ == "__main__":  # before the libraries that are imported next
    from ...upstream import quiet

    quiet()

import argparse
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...runs import PRIVATE_FOLDER, write_text
from .compare import comparison, named
from .evaluation import read_evaluation
from .page import page
from .recorded import read_run, rounds_of

if TYPE_CHECKING:
    from datasets import Dataset

_says_next = ContextVar("_says_next", default=True)


def write_report(
    folder: str | Path | Sequence[str | Path],
    output: str | Path | None = None,
    x: str = "step",
    evaluation: str | Path | None = None,
) -> Path:
    """
    Write the page of a run, or one page of several runs, and return its path.

    Args:
        folder: output directory of a run, or several directories for a comparison. The folder of an online DPO run
            gives a comparison of its rounds.
        output: file to write. The default is `report.html` in the run's folder, or `comparison.html` in the folder
            that all of several runs are in.
        x: horizontal axis for several runs: `step`, or a key that all of them log, such as `episode`.
        evaluation: for several runs, the `evaluation.json` of `trl-ext evaluate`, or its folder.
    """
    folders = [Path(folder)] if isinstance(folder, (str, Path)) else [Path(one) for one in folder]
    if not folders:
        raise ValueError("there is no run to report on; give the output directory of one")
    if len(folders) > 1:
        text, place = _comparison(folders, x, "", evaluation), Path(os.path.commonpath([*map(Path.resolve, folders)]))
        place = place.relative_to(Path.cwd()) if place.is_relative_to(Path.cwd()) else place
    elif rounds := rounds_of(folders[0]):
        text, place = _comparison(rounds, x, folders[0].resolve().name, evaluation), folders[0]
    else:
        for name, given in (("x", x if x != "step" else None), ("evaluation", evaluation)):
            if given is not None:
                raise ValueError(f"`--{name} {given}` is for several runs; give more than one, or leave it out")
        private = folders[0] / PRIVATE_FOLDER
        text, place = page(read_run(folders[0])), private if private.is_dir() else folders[0]
    output = Path(output) if output else place / ("comparison.html" if len(folders) > 1 else "report.html")
    write_text(output, text)
    return output


def _comparison(folders: list[Path], x: str, title: str, evaluation: str | Path | None) -> str:
    each = [run for folder in folders for run in rounds_of(folder) or [folder]]
    found = None if evaluation is None else read_evaluation(Path(evaluation))
    return comparison({name: read_run(folder) for name, folder in named(each).items()}, x, title, found)


def report_of(folder: str | Path, was_trained: bool = True, is_recorded: bool = True) -> str:
    """
    Write a run's page at the end of a script, and return a line that says where it is.

    If the page cannot be written, the line says why; nothing is raised.

    Args:
        folder: output directory of the run.
        was_trained: False if the run was complete already. Its page stays as it is.
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
    """Return a line with the command to run next, for the end of a script; "" within [`without_next`]."""
    return f"\nnext: {command}" if _says_next.get() else ""


@contextmanager
def without_next() -> Iterator[None]:
    """Leave out the lines of [`next_line`], for a script that runs other scripts."""
    before = _says_next.set(False)
    try:
        yield
    finally:
        _says_next.reset(before)


def next_answer(args: Any, rows: "Dataset", folder: str | Path = "", max_new_tokens: int | None = None) -> str:
    """
    Return the shell command that answers the first short prompt of these rows with the model of a run.

    Args:
        args: training arguments of the run.
        rows: rows that it was trained on.
        folder: where the model is, by default the run's `output_dir`.
        max_new_tokens: longest answer, in tokens.
    """
    from ...data import is_messages

    is_chat, prompt = False, "hello"
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
    parser.add_argument("run", type=Path, nargs="+", help="output directory of a run")
    parser.add_argument(
        "--output_file",
        type=Path,
        help="where to write; by default report.html in RUN, or comparison.html in the folder that all runs are in",
    )
    parser.add_argument(
        "--x",
        default="step",
        help="what the curves of several runs are drawn over: step, or a logged key such as episode",
    )
    parser.add_argument(
        "--evaluation", help="evaluation.json of these runs, of `trl-ext evaluate`; its folder will do"
    )
    args = parser.parse_args(arguments)
    try:
        print(write_report(args.run[0] if len(args.run) == 1 else args.run, args.output_file, args.x, args.evaluation))
    except (ValueError, OSError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
