"""
`vllm serve` for tests on a CPU: weights can be changed, and are sent by a file instead of NCCL.

python -m tests.vllm.serve MODEL --weight-transfer-config '{"backend": "file"}' …
"""

import sys
from dataclasses import dataclass

from safetensors.torch import load_file
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.entrypoints.cli.main import main

from tests.vllm.on_cpu import keep_weights


@dataclass
class InitInfo(WeightTransferInitInfo):
    pass


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    path: str  # of a safetensors file with all weights, under the names of their checkpoint


class FileTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):
    init_info_cls, update_info_cls = InitInfo, UpdateInfo

    def init_transfer_engine(self, init_info):
        pass

    def start_weight_update(self):
        pass

    def finish_weight_update(self):
        pass

    def update_weights(self, update_info):  # the original waits for an accelerator
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info):
        self.model.load_weights(load_file(update_info.path).items())

    def shutdown(self):
        pass


# Also in the processes that vLLM spawns, which import this file
keep_weights()
WeightTransferEngineFactory.register_engine("file", FileTransfer)

if __name__ == "__main__":
    sys.argv = ["vllm", "serve", *sys.argv[1:]]
    main()
