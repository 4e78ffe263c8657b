"""Send pictures, and alerts as text, to the trackers of `report_to`; transformers' own callbacks send neither."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def tensorboard_writer(args: Any) -> Iterator[Any]:
    """
    Open a writer of the TensorBoard run `monitors`, beside the run that transformers writes.

    transformers' own writer cannot be used: callbacks have no access to it, and it is closed when training ends.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:  # transformers takes the one or the other, too
        from tensorboardX import SummaryWriter  # type: ignore[no-redef]

    folder = Path(os.getenv("TENSORBOARD_LOGGING_DIR") or Path(args.output_dir) / "runs").expanduser()
    with SummaryWriter(str(folder / "monitors")) as writer:
        yield writer


def trackio_is_open() -> bool:
    """
    Return whether a Trackio run is open.

    When training ends, transformers closes its Trackio run before callbacks that were added later are called.
    """
    import trackio

    return trackio.context_vars.current_run.get() is not None


def send_picture(args: Any, name: str, path: Path, step: int) -> None:
    """Send a PNG to each tracker of `report_to` that takes pictures: W&B, TensorBoard and Trackio."""
    for tracker in args.report_to or []:
        match tracker:
            case "wandb":
                import wandb

                if wandb.run is not None:
                    wandb.log({name: wandb.Image(str(path))})
            case "tensorboard":
                from matplotlib.image import imread

                with tensorboard_writer(args) as writer:
                    writer.add_image(name, imread(path), step, dataformats="HWC")
            case "trackio":
                import trackio

                if trackio_is_open():
                    trackio.log({name: trackio.Image(str(path))})
