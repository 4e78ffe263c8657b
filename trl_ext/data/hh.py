"""Turn dialogues of Anthropic's HH-RLHF into preference pairs in TRL's conversational format."""

import re

_ROLES = {"Human": "user", "Assistant": "assistant"}
_TURN = re.compile(r"(?:^|\n\n)(Human|Assistant):")


def split_dialogue(text: str) -> list[dict[str, str]]:
    """
    Split a dialogue written as `\\n\\nHuman: …\\n\\nAssistant: …`, the form of `Anthropic/hh-rlhf`, into messages.

    Successive turns of the same speaker, which the data has and chat templates refuse, become one message.

    Raises:
        ValueError: the text does not begin with a turn.
    """
    before, *parts = _TURN.split(text.strip())
    if before or not parts:
        raise ValueError(f"a dialogue must begin with 'Human:' or 'Assistant:', got {text[:40]!r}")
    messages: list[dict[str, str]] = []
    for speaker, content in zip(parts[::2], parts[1::2], strict=True):
        role, content = _ROLES[speaker], content.strip()
        if messages and messages[-1]["role"] == role:
            messages[-1]["content"] = "\n\n".join(filter(None, (messages[-1]["content"], content)))
        else:
            messages.append({"role": role, "content": content})
    return messages


def split_pair(chosen: str, rejected: str) -> dict[str, list[dict[str, str]]]:
    """
    Split two dialogues into their common `prompt` and their last answers, `chosen` and `rejected`.

    Raises:
        ValueError: the dialogues differ before the last message, or one does not end with an answer that has text.
            HH-RLHF has some such pairs; leave them out.
    """
    dialogues = split_dialogue(chosen), split_dialogue(rejected)
    for name, messages in zip(("chosen", "rejected"), dialogues, strict=True):
        if messages[-1]["role"] != "assistant" or not messages[-1]["content"]:
            raise ValueError(f"the {name} dialogue ends with {messages[-1]}, not with an answer: leave the pair out")
    (*prompt, last_chosen), (*other, last_rejected) = dialogues
    if prompt != other or not prompt or prompt[-1]["role"] != "user":
        raise ValueError("the two dialogues differ before their last answer, or have no question: leave the pair out")
    return {"prompt": prompt, "chosen": [last_chosen], "rejected": [last_rejected]}
