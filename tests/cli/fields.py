"""What the tests of each config's own fields share."""

import torch


def assert_each_changes(changed, trained, subtests):
    """Train with another value of each field, of `{name: (value, what else must be set)}`: the weights must differ."""
    known: dict[str, torch.Tensor] = {}
    for name, (value, needed) in changed.items():
        with subtests.test(name=name):
            key = str(sorted(needed.items()))
            if key not in known:
                known[key] = trained(**needed)
            assert not torch.equal(trained(**{**needed, name: value}), known[key])
    assert torch.equal(trained(), known["[]"])  # or nothing is shown
