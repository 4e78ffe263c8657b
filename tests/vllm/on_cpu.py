"""
Makes weights of vLLM's CPU build changeable, as TRL's colocate mode needs. For tests only.

After loading, vLLM packs each weight for its kernels and deletes it, so `load_weights`, which TRL calls with new
weights, has nothing to write to. Here the weights stay and are used directly, as in vLLM where it has no kernel. On a
GPU nothing is packed.
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
    """Keep vLLM's weights unpacked; call this before a model is loaded."""
    os.environ.update(ENVIRONMENT)
    from torch.nn.functional import linear
    from vllm.model_executor.layers import utils

    def plain(layer, remove_weight):
        layer.cpu_linear = lambda x, weight, bias: linear(x, weight, bias)

    plain.packing = utils.dispatch_cpu_unquantized_gemm  # as in vLLM
    utils.dispatch_cpu_unquantized_gemm = plain
