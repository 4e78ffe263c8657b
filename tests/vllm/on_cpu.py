"""
What vLLM's CPU build needs for TRL's colocate mode, in tests alone: weights that can be changed.

After loading it packs each weight for its kernels, and forgets the weight: `load_weights`, by which TRL brings new
ones, then finds nothing to write to. Here it keeps the weights and multiplies by them, as it does itself where it has
no kernel. On a GPU nothing is packed.
"""

import os

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}


def keep_weights():
    """Keep vLLM's weights as they are loaded; to be called before a model is."""
    os.environ.update(ENVIRONMENT)
    from torch.nn.functional import linear
    from vllm.model_executor.layers import utils

    def plain(layer, remove_weight):
        layer.cpu_linear = lambda x, weight, bias: linear(x, weight, bias)

    plain.packing = utils.dispatch_cpu_unquantized_gemm  # what vLLM itself does
    utils.dispatch_cpu_unquantized_gemm = plain
