"""How far rounding alone may drive two runs of the same mathematics apart on this CPU."""

import torch
from torch.utils._pytree import tree_leaves


def numbers(tree):
    """Return all numbers and tensors in nested dicts and lists, as one vector of float64."""
    leaves = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, int | float | torch.Tensor)]
    return torch.cat([torch.as_tensor(leaf).double().flatten() for leaf in leaves] or [torch.zeros(0)])


def bound(whole, split):
    """
    Return as tolerances ten times the distance between a run and the same one with its batches split.

    Adam divides a gradient near 0 by its own size, so a weight may move by much more than its gradient is rounded. By
    how much depends on the CPU, and the split run measures it. The bound is at least ten roundings of the largest
    number, and at most a tenth of one step of Adam at the tests' learning rate of 1e-3: a wrong gradient is seen.
    """
    whole, split = numbers(whole), numbers(split)
    largest = max([1.0, *whole.abs().tolist()])
    apart = max([torch.finfo(torch.float32).eps * largest, *(split - whole).abs().tolist()])
    assert apart <= 1e-5 * largest, f"splitting its batches moved a run by {apart:.1e}"
    return {"rtol": 0, "atol": 10 * apart}
