"""Huawei's Ascend NPUs, which ``torch_npu`` adds to PyTorch as the type ``npu``.

Tested with the real package over an emulated runtime; numerics, speed and graphs (aclgraph) were never tested on a
chip.
"""

from __future__ import annotations

import torch

from .spec import DeviceSpec
from .torch_module import counter, functions, hook, stream_handle


def _unowned_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view made by ``torch_npu``, because its storages also describe the format of their memory."""
    import torch_npu

    view: torch.Tensor = torch_npu._C._weak_ref_tensor(tensor)
    return view


ASCEND = DeviceSpec(
    name="ascend",
    vendor="ascend",
    torch_type="npu",
    extension="torch_npu",
    dispatch_key="PrivateUse1",
    dist_backend="hccl",
    platform_config="ascend",
    visible_devices="ASCEND_RT_VISIBLE_DEVICES",
    ray_resource="NPU",
    priority=20,
    host_attention={"SGLang": "ascend"},
    host_questions={"SGLang": "sglang.srt.utils.common:is_npu"},
    pin_memory=True,
    flagcx_stream=stream_handle("npu", "npu_stream"),
    quantized=("vLLM", "SGLang"),
    graphs=True,
    graph_class="NPUGraph",
    unowned_view=_unowned_view,
    model_runners=("v1", "v2"),
    detect=lambda: counter("npu", "torch_npu")() > 0,
    device_count=counter("npu", "torch_npu"),
    device_name=hook("npu", "get_device_name"),
    memory=hook("npu", "mem_get_info"),
    **functions("npu"),
)
