import pytest

from tests.recipes.small_runs import make_inputs


@pytest.fixture(scope="session")
def inputs(tmp_path_factory):
    """A model and data for every recipe; tests only read them."""
    return make_inputs(tmp_path_factory.mktemp("inputs"))
