"""Every call of the Ascend backend against the genuine ``torch_npu``: its schemas, and its Meta kernels for shapes.

Nothing is computed here. The tests are skipped if ``torch_npu`` cannot be imported.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from builders import as_called
from fl_dispatch.backends.vendor.ascend.impl import attention_mask
from fl_dispatch.backends.vendor.ascend.register_ops import register_builtins
from fl_dispatch.ops import OPERATORS, Sample
from fl_dispatch.registry import OpRegistry
from fl_dispatch.types import OpImpl

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CALLS = {
    "silu_and_mul": {"npu_swiglu"},
    "gelu_and_mul": {"npu_geglu"},
    "swigluoai_and_mul": {"npu_clipped_swiglu"},
    "silu_and_mul_with_clamp": {"npu_clipped_swiglu"},
    "gelu": {"npu_gelu"},
    "quick_gelu": {"npu_fast_gelu"},
    "rms_norm": {"npu_rms_norm", "npu_add_rms_norm"},
    "gemma_rms_norm": {"npu_gemma_rms_norm"},
    "layer_norm": {"npu_layer_norm_eval"},
    "rotary_embedding": {"npu_rotary_mul"},
    "linear": {"npu_linear"},
    "quantize": {"npu_dynamic_quant", "npu_quantize"},
    "scaled_linear": {"npu_quant_matmul"},
    "weight_only_linear": {"npu_weight_quant_batchmatmul"},
    "kv_cache_write": {"npu_scatter_pa_kv_cache", "npu_scatter_nd_update_"},
    "paged_attention": {"npu_fused_infer_attention_score"},
    "mla_decode": {"npu_fused_infer_attention_score_v2"},
    "mla_prefill": {"npu_fused_infer_attention_score_v2"},
    "index_key_write": {"npu_scatter_nd_update_"},
    "index_topk": {"npu_lightning_indexer"},
    "mla_sparse": {"npu_sparse_flash_attention"},
    "topk_softmax": {"npu_moe_gating_top_k"},
    "topk_sigmoid": {"npu_moe_gating_top_k"},
    "grouped_topk": {"npu_moe_gating_top_k"},
    "fused_moe": {
        "npu_moe_init_routing_v2",
        "npu_grouped_matmul",
        "npu_moe_token_unpermute",
        "npu_swiglu",
        "npu_geglu",
    },
    "scaled_moe": {
        "npu_moe_init_routing_v2",
        "npu_grouped_matmul",
        "npu_dequant_swiglu_quant",
        "npu_moe_token_unpermute",
    },
    "weight_only_moe": {"npu_moe_init_routing_v2", "npu_grouped_matmul", "npu_moe_token_unpermute", "npu_swiglu"},
    "moe_sum": {"npu_moe_token_unpermute"},
}
"""The calls that the samples of each operator make, all of them."""


@pytest.fixture(autouse=True, scope="module")
def genuine() -> Iterator[None]:
    """The wheel with a device, and no mask left over that has no data."""
    try:
        importlib.import_module("torch_npu")
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"torch_npu cannot be imported: {error}")
    if not torch.npu.is_available():
        pytest.skip("torch_npu finds no device, genuine or emulated")
    yield
    attention_mask.triangle.cache_clear()


class Recording(TorchDispatchMode):
    """Notes which operators of ``torch_npu`` run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "npu":
            # The unpermutation runs as a private twin of the same name.
            self.names.add(func._schema.name.partition("::")[2].removeprefix("_"))
        return func(*args, **(kwargs or {}))


def implementation(name: str) -> OpImpl:
    return as_called(register_builtins, name, "vendor.ascend")


def supported(name: str, dtype: torch.dtype) -> Iterator[Sample]:
    supports = implementation(name).supports
    assert supports is not None
    samples = OPERATORS[name].samples
    assert samples is not None
    for sample in samples(dtype, torch.device("cpu"), torch.Generator().manual_seed(0)):
        if supports(*sample.args) is True:
            yield sample


def hints(name: str, sample: Sample) -> dict[str, Any]:
    """A host's knowledge of a sample: the numbers in its tensors, since tensors without data have none."""
    values = dict(zip(OPERATORS[name].parameters, sample.args, strict=False))
    known = {f"{key}_host": value.tolist() for key, value in values.items() if f"{key}_host" in OPERATORS[name].hints}
    return {**known, **({"may_skip": False} if "may_skip" in OPERATORS[name].hints else {})}


@pytest.mark.parametrize("name", CALLS)
def test_every_call_fits_the_genuine_schema_and_gives_the_declared_shapes(name: str) -> None:
    operator, called, ran = OPERATORS[name], set(), 0
    assert operator.fake is not None
    for dtype in DTYPES:
        for sample in supported(name, dtype):
            attention_mask.triangle.cache_clear()
            with FakeTensorMode(), Recording() as recording:
                storages: dict[int, Tensor] = {}
                args = tuple(_shared(value, storages) for value in sample.args)
                results = implementation(name).fn(*args, **hints(name, sample))
                expected = operator.fake(*operator.bind(args, {}))
            called |= recording.names
            ran += 1
            for result, wanted in zip(_tensors(results), _tensors(expected), strict=True):
                assert (result.shape, result.dtype, result.device) == (wanted.shape, wanted.dtype, wanted.device), (
                    sample.label
                )
    assert ran
    assert called == CALLS[name]


def _shared(value: Any, storages: dict[int, Tensor]) -> Any:
    """An argument on the device; views of one tensor stay views of one tensor."""
    if not isinstance(value, Tensor):
        return value
    place = value.untyped_storage().data_ptr()
    if place not in storages:
        size = value.untyped_storage().nbytes() // value.element_size()
        storages[place] = torch.empty(size, dtype=value.dtype, device="npu:0")
    return storages[place].as_strided(value.shape, value.stride(), value.storage_offset())


def _tensors(results: Any) -> list[Tensor]:
    parts = results if isinstance(results, tuple) else (results,)
    return [part for part in parts if part is not None]


def test_every_registered_operator_that_computes_is_checked() -> None:
    registry = OpRegistry()
    register_builtins(registry)
    names = {name for name in OPERATORS if registry.get_implementation(name, "vendor.ascend") is not None}
    assert names == {*CALLS, "attention_backend"}


def test_an_argument_of_a_wrong_type_is_refused_by_the_schema() -> None:
    import torch_npu

    with FakeTensorMode(), pytest.raises((RuntimeError, TypeError)):
        torch_npu.npu_rms_norm(torch.empty(2, 8, device="npu:0"), "gamma", 1e-6)


def test_the_backend_is_available_where_torch_npu_has_a_device() -> None:
    assert implementation("rms_norm").availability() == (True, "")
