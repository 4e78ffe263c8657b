"""Two gloo processes have one β and train as one process with the same global batch."""

import pytest
from torch.testing import assert_close

from tests.dpo.test_row_means import KINDS, ROWS, evaluated, trainer_of
from tests.dpo.worker import DRIFT, INFORMED, NORMALIZED, WITH_SFT, run, saved
from tests.launch import on_two_processes

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

ROUNDED = {"rtol": 1e-4, "atol": 1e-5}  # float32 has steps of 2e-6 at a completion's log-prob of some 20 nats


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    """A run of one process, with a checkpoint; then a launch's folder and the results of each process."""
    folder = tmp_path_factory.mktemp("distributed")
    by_one = saved(folder / "by one", 1, **DRIFT, **NORMALIZED)
    return by_one, folder, *on_two_processes(("tests.dpo.worker", folder))


@pytest.fixture(scope="module")
def results(launch):
    return launch[2]


def test_beta_and_its_controller_are_equal_on_both_processes(results):
    one, other = (process["drift"] for process in results)
    for process in (one, other):
        assert process["processes"] == 2 and process["wrapper"] == "DistributedDataParallel"
    for what in ("state", "beta", "betas", "weights", "drift", "displacement"):
        assert_close(one[what], other[what], rtol=0, atol=0)
    assert len(set(one["betas"])) > 1


def test_two_processes_train_as_one(results, tmp_path):
    one = run(tmp_path, 1, **DRIFT, **NORMALIZED, **INFORMED)
    assert one["processes"] == 1
    two = results[0]["drift"]
    for what in ("state", "beta", "betas", "drift", "displacement", "losses"):
        assert_close(two[what], one[what], **ROUNDED)
    assert_close(two["weights"], one["weights"], **ROUNDED)


def test_tokens_of_both_processes_have_the_same_weight(results, tmp_path):
    assert_close(results[0]["sft"]["weights"], run(tmp_path, 1, **WITH_SFT)["weights"], **ROUNDED)


@pytest.mark.parametrize("kind", KINDS)
def test_an_evaluation_counts_each_row_once(kind, results, tmp_path):
    for process in results:  # 7 and 3 rows in batches of 2 on two processes: copies fill the last batches
        assert_close(process["evaluated"][kind], evaluated(trainer_of(kind, tmp_path, ROWS, 7)), **ROUNDED)


def test_resuming_on_two_processes_is_exact(results):
    for process in results:
        whole, again = process["resumed"]
        assert_close(again, whole, rtol=0, atol=0)
    assert_close(results[0]["resumed"], results[1]["resumed"], rtol=0, atol=0)


def test_a_checkpoint_resumes_on_another_number_of_processes(launch, tmp_path):
    """With the same global batch: the controllers' state is saved once, for all processes."""
    by_one, folder, (by_two, _) = launch
    from_two = saved(tmp_path, 1, folder / "resumed" / "checkpoint-3", **DRIFT, **NORMALIZED)
    for end, expected in ((by_two["from one"], by_one), (from_two, by_two["resumed"][0])):
        for what in ("state", "beta"):
            assert_close(end[what], expected[what], **ROUNDED)
        assert_close(end["weights"], expected["weights"], **ROUNDED)


def test_a_row_that_is_not_finite_on_one_process_ends_both(results):
    first, second = (process["broken"] for process in results)
    assert first == second and "not finite" in first
