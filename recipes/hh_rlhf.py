"""Write Anthropic's HH-RLHF in TRL's conversational formats, as recipes/qwen2.5-1.5b reads it.

    python recipes/hh_rlhf.py --output_dir data/hh-rlhf

Under `output_dir`, each with `train.jsonl` and `test.jsonl`: `preference/` (`prompt`, `chosen`, `rejected`), `sft/`
(`prompt`, `completion`: the chosen answers to one half of the prompts) and `prompts/` (the other half, for PPO).
"""

import hashlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path

from trl_ext import StrictTrlParser, load_dataset_split
from trl_ext.runs import setting
from trl_ext.upstream import quiet

_ROLES = {"Human": "user", "Assistant": "assistant"}
_TURN = re.compile(r"(?:^|\n\n)(Human|Assistant):")


@dataclass
class HHArguments:
    """Declare the arguments: the source dataset, and the folder to write."""

    output_dir: str = field(metadata={"help": "Folder to write; it must be new or empty."})
    dataset_name: str = setting("Anthropic/hh-rlhf", "Dataset with dialogues in `chosen` and `rejected`.")

    def __post_init__(self):
        if Path(self.output_dir).exists() and (
            Path(self.output_dir).is_file() or any(Path(self.output_dir).iterdir())
        ):
            raise ValueError(f"`output_dir` {self.output_dir} exists and is not empty: choose another folder")


def split_dialogue(text: str) -> list[dict[str, str]]:
    """
    Split a dialogue written as `\\n\\nHuman: …\\n\\nAssistant: …`, the form of `Anthropic/hh-rlhf`, into messages.

    Successive turns of the same speaker, which some dialogues have but chat templates reject, become one message.
    """
    messages: list[dict[str, str]] = []
    parts = _TURN.split(text.strip())[1:]
    for speaker, content in zip(parts[::2], parts[1::2], strict=True):
        role = _ROLES[speaker]
        content = content.strip()
        if messages and messages[-1]["role"] == role:
            messages[-1]["content"] = "\n\n".join(filter(None, (messages[-1]["content"], content)))
        else:
            messages.append({"role": role, "content": content})
    return messages


def split_pair(chosen: str, rejected: str) -> dict[str, list[dict[str, str]]]:
    """
    Split two dialogues into their common `prompt` and their last answers, `chosen` and `rejected`.

    Raises:
        ValueError: the dialogues differ before the last message, have no question, or do not end with answers that
            have text. HH-RLHF has some such pairs; leave them out.
    """
    one = split_dialogue(chosen)
    other = split_dialogue(rejected)
    answers = [*one[-1:], *other[-1:]]
    is_answered = len(answers) == 2 and all(each["role"] == "assistant" and each["content"] for each in answers)
    if not is_answered or one[:-1] != other[:-1] or [each["role"] for each in one[-2:-1]] != ["user"]:
        raise ValueError("the two dialogues are not one question with two answers: leave the pair out")
    return {"prompt": one[:-1], "chosen": answers[:1], "rejected": answers[1:]}


def is_for_sft(prompt: list[dict[str, str]]) -> bool:
    """Return whether a prompt is in the half for SFT, by a hash that is the same on every machine."""
    return hashlib.sha256(json.dumps(prompt).encode()).digest()[0] % 2 == 0


def main(arguments: list[str] | None = None) -> None:
    quiet()
    parser = StrictTrlParser(HHArguments, without_arguments=__doc__)
    (args,) = parser.parse_args_and_config(arguments)
    for split in ("train", "test"):
        with parser.one_line_errors():
            rows = load_dataset_split(args.dataset_name, split, columns=("chosen", "rejected"))
        pairs = []
        left_out = 0
        for row in rows:
            try:
                pairs.append(split_pair(row["chosen"], row["rejected"]))
            except ValueError:
                left_out += 1
        prompts = {json.dumps(pair["prompt"]): pair for pair in pairs if not is_for_sft(pair["prompt"])}
        written = {
            "preference": pairs,
            "sft": [{"prompt": p["prompt"], "completion": p["chosen"]} for p in pairs if is_for_sft(p["prompt"])],
            "prompts": [{"prompt": pair["prompt"]} for pair in prompts.values()],
        }
        for name, lines in written.items():
            file = Path(args.output_dir, name, f"{split}.jsonl")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
        counts = ", ".join(f"{name} {len(lines)}" for name, lines in written.items())
        print(f"{split}: {len(pairs)} pairs, {left_out} left out; rows written: {counts}")


if __name__ == "__main__":
    main()
