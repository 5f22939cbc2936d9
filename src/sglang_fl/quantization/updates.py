"""New weights for a running engine: prepared forms are rebuilt, and a quantized model refuses new weights.

Loading converts quantized weights to the form of their operators, and no loader is left for the checkpoint's form.
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
"""SGLang's methods for new weights, in a scheduler's updater → the class of their answers."""


def refusing(way: str) -> Callable[..., Any]:
    """Return the hook of one method: it answers no if a model of this scheduler is quantized, on every rank alike."""

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
        weights_were_written()  # whichever method of SGLang writes them
        return answer

    return update
