"""New weights for an engine that runs: forms of them are made anew, and a quantized model refuses them.

Loading puts quantized weights into the form of their operators for good: no loader is left that knows the checkpoint's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from fl_dispatch import weights_were_written
from fl_dispatch.logger_manager import get_logger

logger = get_logger(__name__)

ANSWERS: Mapping[str, str] = MappingProxyType(
    {
        "begin_weight_update": "BeginWeightUpdateReqOutput",
        "update_weights_from_disk": "UpdateWeightFromDiskReqOutput",
        "update_weights_from_distributed": "UpdateWeightsFromDistributedReqOutput",
        "update_weights_from_tensor": "UpdateWeightsFromTensorReqOutput",
        "update_weights_from_ipc": "UpdateWeightsFromIPCReqOutput",
    }
)
"""SGLang's ways to new weights, as methods of a scheduler's updater → its class of their answers."""


def refusing(way: str) -> Callable[..., Any]:
    """The hook of one way: its answer says no if a model of this scheduler is quantized, on each rank alike."""

    def update(original: Callable[..., Any], updater: Any, recv_req: Any) -> Any:
        from sglang.srt.managers import io_struct

        for _, runner in updater._select_runners():
            model = runner.model_config
            if model.quantization is not None:
                named = f"a model that is quantized by '{model.quantization}'"
                said = f"sglang_fl does not support new weights for {named} yet (model {model.model_path})"
                logger.error("%s", said)
                return getattr(io_struct, ANSWERS[way])(success=False, message=said)
        answer = original(updater, recv_req)
        weights_were_written()  # however a way of SGLang's writes them
        return answer

    return update
