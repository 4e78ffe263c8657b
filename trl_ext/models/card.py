"""Correct TRL's model card, which otherwise names a model `None`."""

import os
from pathlib import Path

_NONE = "[None](https://huggingface.co/None)"


def without_none(output_dir: str, base: str) -> None:
    """
    Replace the `None` that TRL's model card shows for a local base, and for a model that is not pushed to the hub.

    Args:
        output_dir: the folder with the card, if this process wrote one.
        base: folder of the base, or its hub name; "" for a model that was built in memory.
    """
    card = Path(output_dir) / "README.md"
    if not card.is_file():
        return
    text = card.read_text(encoding="utf-8")
    if base:
        text = text.replace(_NONE, f"`{os.path.basename(os.path.normpath(base))}`, a local model")
    text = text.replace(f"a fine-tuned version of {_NONE}", "a fine-tuned model")
    name = os.path.basename(os.path.abspath(output_dir))
    text = text.replace("# Model Card for None\n", f"# Model Card for {name}\n").replace(
        'model="None"', f'model="{name}"'
    )
    card.write_text(text, encoding="utf-8")
