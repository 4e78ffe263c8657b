"""Check the shapes of tensors, for all functions in this folder."""

from torch import Tensor


def check_shapes(ndim: int | None = None, **tensors: Tensor) -> None:
    """Check that the named tensors all have the shape of the first tensor.

    Args:
        ndim: number of dimensions of the first tensor; None allows any.
        tensors: the tensors to compare, by the names that the error message shows.

    Raises:
        ValueError: the first tensor does not have `ndim` dimensions, or another tensor does not have its shape.
    """
    (first, reference), *others = tensors.items()
    if ndim is not None and reference.ndim != ndim:
        raise ValueError(
            f"{first} must have {ndim} dimensions, got shape {tuple(reference.shape)}; "
            "reshape it, with one row per sequence."
        )
    for name, tensor in others:
        if tensor.shape != reference.shape:
            raise ValueError(
                f"{name} must have the shape of {first} {tuple(reference.shape)}, got {tuple(tensor.shape)}; pad or "
                "slice both to the same tokens (shapes are not broadcast)."
            )
