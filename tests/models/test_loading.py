from types import SimpleNamespace

from accelerate import DistributedType

from tests.tiny import tiny_llama
from trl_ext.models.loading import Loader


def test_on_several_gpus_each_process_loads_its_models_on_its_own():
    """By default TRL spreads what it loads over all GPUs (`device_map="auto"`), which every process would do."""
    alone, one_of_two = (
        Loader(tiny_llama(), None, {}, False, SimpleNamespace(num_processes=n, distributed_type=DistributedType.NO))
        for n in (1, 2)
    )
    assert "device_map" not in alone.kwargs
    assert one_of_two.kwargs["device_map"] is None
