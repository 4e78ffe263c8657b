"""Two processes of one launch try to hold a folder that is in use, and one that is free."""

import sys
from pathlib import Path

import torch
from accelerate import PartialState

from trl_ext.runs.output_dir import FolderInUse, Hold

if __name__ == "__main__":
    held, folder = Path(sys.argv[1]), Path(sys.argv[2])
    state = PartialState(cpu=True)
    try:
        refused = str(Hold(held))
    except FolderInUse as error:
        refused = str(error)
    with Hold(folder):
        state.wait_for_everyone()
    torch.save({"refused": refused, "held": True}, folder / f"process {state.process_index}.pt")
