"""The list cannot rot: each mutant still applies, and its test is still there. That it is caught, run.py shows."""

import pytest

from tests.mutants.mutants import ROOT, read


@pytest.mark.slow
def test_each_mutant_applies_and_its_test_exists():
    mutants, wrong = read(), []
    for mutant in mutants:
        try:
            file, test = mutant.file(), mutant.test_id()
        except ValueError as error:
            wrong.append(str(error))
            continue
        now = file.relative_to(ROOT).as_posix(), test
        if now != (mutant.path, mutant.test):
            wrong.append(f"{mutant.name} moved: {' and '.join(now)} are to stand in mutants.toml")
        if mutant.old == mutant.new:
            wrong.append(f"{mutant.name} changes nothing")
    names = [mutant.name for mutant in mutants]
    wrong += [f"{name} is the name of two mutants" for name in {*names} if names.count(name) > 1]
    assert not wrong, "\n".join(wrong)
    assert len(mutants) >= 150
