"""Compiled models: changes to vLLM's configuration, and the order of events at the worker's start.

Implementations prove themselves in an eager pass. Then every choice is fixed and becomes part of vLLM's compile-cache
key, and only then compilation starts: vLLM drops the guards of its graphs, so a later choice would never reach them.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING, Any

from torch import nn

from fl_dispatch import get_policy, set_global_policy
from fl_dispatch.devices import CPP, TRITON, DeviceSpec
from fl_dispatch.hosting.compilation import inductor, kernel_numbers
from fl_dispatch.hosting.layers.attribute import replaced
from fl_dispatch.hosting.start.first_choices import boundary, joins, of_one_backend, without_graphs
from fl_dispatch.logger_manager import get_logger
from fl_dispatch.ops import OPERATORS
from fl_dispatch.ops.attention import SCALES
from fl_dispatch.settings import get_settings
from fl_dispatch.settings.origins import Origin

from ..attention import kv_layout
from ..compat import versions, whole_graphs

if TYPE_CHECKING:
    from vllm.config import CompilationConfig, CompilationMode, VllmConfig

logger = get_logger(__name__)

PASS_MANAGER = "vllm_fl.compilation.passes.PassManagerFL"
DEFAULT_BACKEND, WITHOUT_INDUCTOR = "inductor", "eager"
CPP_OPTIONS = {
    "dce": True,
    "size_asserts": False,
    "nan_asserts": False,
    "epilogue_fusion": True,
    "cpp.dynamic_threads": True,
}
"""Inductor's options for C++, as on vLLM's own CPU platform: the process's number of threads applies at run time."""
JOINED_BY_US: Mapping[str, str] = {
    "rms_norm": "fuse_norm_quant",
    "silu_and_mul": "fuse_act_quant",
    "rotary_embedding": "fuse_rope_kvcache",
}
"""Operator that our pass fuses with the user of its result (:mod:`.quantized_results`, :mod:`.rotary_cache`) → vLLM's
switch for that."""
ROTATIONS = JOINED_BY_US["rotary_embedding"]
ROTATE_AND_WRITE = "rotary_embedding_kv_cache_write"
"""The operator that fuses a rotation with the write of keys and values into the cache."""
ROTATION_PARTS = ("rotary_embedding", "kv_cache_write")
ASKED_TO_JOIN = "VLLM_FL_FUSE_ROPE_KVCACHE"
FUSED = "fused_linear"
"""The operator that fuses a product with the norm before it and the gate after it (:mod:`.one_token`)."""
ASKED_TO_FUSE = "VLLM_FL_FUSE_ONE_TOKEN"
WRITE = "vllm::unified_kv_cache_update"
"""vLLM's operator that writes the cache; vLLM splits its graphs at it by default."""
LATENT_WRITE = "vllm::unified_mla_kv_cache_update"
"""vLLM's operator that writes a latent cache; vLLM splits its graphs at it by default."""
joined_calls: Counter[str] = Counter()
"""Operator → number of its calls that this process's passes fused with the user of their result."""
MANIFEST_KEY = "fl_dispatch_manifest"
"""The key of the frozen choices' hash in vLLM's ``additional_config``, which is part of its compile-cache key."""


def is_compiled(vllm_config: VllmConfig) -> bool:
    """Whether the model is compiled in any of vLLM's modes."""
    from vllm.config import CompilationMode

    return vllm_config.compilation_config.mode not in (None, CompilationMode.NONE)


def is_captured(vllm_config: VllmConfig) -> bool:
    """Whether graphs of the model are captured."""
    from vllm.config import CUDAGraphMode

    return vllm_config.compilation_config.cudagraph_mode not in (None, CUDAGraphMode.NONE)


def model_backend(device: DeviceSpec) -> str:
    """Return the compilation backend for models on a device."""
    return WITHOUT_INDUCTOR if device.inductor is None else DEFAULT_BACKEND


def helper_backend(device: DeviceSpec) -> str:
    """Return the backend for vLLM's small helper functions, which then need no C++ compiler at run time."""
    return DEFAULT_BACKEND if device.inductor == TRITON else WITHOUT_INDUCTOR


def default_mode(vllm_config: VllmConfig, device: DeviceSpec) -> CompilationMode:
    """Return the default mode on a device for which Inductor writes no Triton kernels.

    The mode is that of vLLM's own CPU platform, one graph for the whole model, if Inductor can build C++ and no
    requested feature is missing in compiled models; otherwise no compilation.
    """
    from vllm.config import CompilationMode

    lacking = any(asked for asked, _ in lacked_by_compiled_models(vllm_config))
    if device.inductor != CPP or lacking or get_settings().flagcx_path is not None:
        return CompilationMode.NONE
    if missing := inductor.missing_for_cpp():
        logger.info("the model runs eagerly, because compilation needs %s on %s", missing, device.name)
        return CompilationMode.NONE
    return CompilationMode.DYNAMO_TRACE_ONCE


def lacked_by_compiled_models(vllm_config: VllmConfig) -> list[tuple[bool, str]]:
    """Return features that need eager models, each with whether it is requested."""
    model = vllm_config.model_config
    return [
        (model is not None and model.is_encoder_decoder, "compiled encoder-decoder models"),
    ]


# -- configuration ----------------------------------------------------------------------------------------------------


def refuse_missing_compiler(vllm_config: VllmConfig, device: DeviceSpec) -> None:
    """Raise ``ValueError`` if Inductor is requested and cannot build code for this device."""
    asked = is_compiled(vllm_config) and vllm_config.compilation_config.backend == DEFAULT_BACKEND
    if asked and device.inductor is None:
        raise ValueError(
            f"Inductor writes no code for {device.name}; choose the compilation backend '{WITHOUT_INDUCTOR}', or leave "
            "compilation off (enforce_eager)"
        )
    if asked and device.inductor == CPP and (missing := inductor.missing_for_cpp()):
        raise ValueError(
            f"compilation with Inductor needs {missing} on {device.name}; install it, or choose the compilation "
            "backend 'eager', or leave compilation off (enforce_eager)"
        )


def has_passes(compilation: CompilationConfig) -> bool:
    """Whether our passes run over the model's graphs."""
    from vllm.config import CompilationMode

    return (
        _is_our_pass_manager()
        and compilation.mode == CompilationMode.VLLM_COMPILE
        and compilation.backend == DEFAULT_BACKEND
    )


def _is_our_pass_manager() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.get_pass_manager_cls() == PASS_MANAGER)


def join_rotations(vllm_config: VllmConfig, own_attention: bool) -> None:
    """Fuse rotations with the write of keys and values if the user asks for it and it is possible.

    vLLM then does not split its graphs between the two. Outside ROCm users cannot set vLLM's own switch, so the setting
    is ours, and the switch shows the result.

    Args:
        own_attention: whether the layers' attention is :class:`~vllm_fl.attention.dense.AttentionFLImpl`.
    """
    compilation = vllm_config.compilation_config
    if apart := _why_apart(vllm_config, own_attention):
        logger.warning("%s: rotations and the write of keys and values stay apart: %s", ASKED_TO_JOIN, "; ".join(apart))
        return
    if compilation.splitting_ops is None:
        compilation.splitting_ops = [*compilation._attention_ops, LATENT_WRITE]
        logger.info("CompilationConfig.splitting_ops: without '%s', which may be joined with rotations", WRITE)
    setattr(compilation.pass_config, ROTATIONS, True)
    # For batches of any size, to avoid another compilation for those of more than 256 tokens.
    compilation.pass_config.rope_kvcache_fusion_max_token_num = vllm_config.scheduler_config.max_num_batched_tokens


def _why_apart(vllm_config: VllmConfig, own_attention: bool) -> list[str]:
    """List every reason against fusing rotations with the write.

    Captured pieces then contain the write, so graphs must be able to hold it. A layer's name must be an input of a
    piece, otherwise no two layers would be equal; and a draft model's batches have other slots than the model's. The
    fused operator does not take the scales of an int8 cache.
    """
    from vllm.utils import torch_utils

    if not versions.is_tested():
        return ["it was not tested with this vLLM"]
    compilation, model = vllm_config.compilation_config, vllm_config.model_config
    cache_dtype = vllm_config.cache_config.cache_dtype
    scales = SCALES if cache_dtype in kv_layout.FP8_DTYPES else ()
    sharing = 0 if model is None else getattr(model.hf_text_config, "num_kv_shared_layers", 0)
    found = [
        (not has_passes(compilation), "our passes run in graphs that VLLM_COMPILE compiles with Inductor"),
        (not torch_utils._USE_LAYERNAME, "names of layers are constants of graphs"),
        (compilation.use_inductor_graph_partition, "Inductor divides the graph (use_inductor_graph_partition)"),
        (WRITE in (compilation.splitting_ops or ()), f"splitting_ops name '{WRITE}'"),
        (vllm_config.speculative_config is not None, "drafts have slots of their own"),
        (vllm_config.parallel_config.use_ubatching, "batches are cut in two (ubatching)"),
        (model is None or model.use_mla, "the model has latent attention, or there is none"),
        (model is not None and model.is_encoder_decoder, "the model has an encoder"),
        (bool(sharing), "layers share a cache"),
        (not own_attention, "another class of attention is chosen"),
        (cache_dtype == kv_layout.INT8_DTYPE, "the cache is in int8"),
        (
            not (joins(ROTATE_AND_WRITE, ROTATION_PARTS) and of_one_backend(ROTATE_AND_WRITE, ROTATION_PARTS)),
            f"'{ROTATE_AND_WRITE}' has only its reference, or its parts have rules or first choices of others",
        ),
        (
            is_captured(vllm_config) and bool(without_graphs(("kv_cache_write", ROTATE_AND_WRITE), scales)),
            "no graph can hold the write",
        ),
    ]
    return [why for holds, why in found if holds]


def adapt(compilation: CompilationConfig, device: DeviceSpec) -> None:
    """Change settings that a compiled model cannot run with on this platform; log one INFO line per change."""
    ours = set(JOINED_BY_US.values() if has_passes(compilation) else ())
    fusions = [
        field.name
        for field in fields(compilation.pass_config)
        if field.name.startswith(("fuse_", "enable_"))
        and getattr(compilation.pass_config, field.name)
        and field.name not in ours
    ]
    for name in fusions:
        setattr(compilation.pass_config, name, False)
    if fusions:
        logger.info(
            "PassConfig.%s: off, because they join operators of vLLM's CUDA library", ", PassConfig.".join(fusions)
        )
    if device.graphs:
        _divide_ranges(compilation)
        return
    sizes = sorted({size for size in compilation.compile_sizes or () if isinstance(size, int)})
    if compilation.compile_sizes and sizes != compilation.compile_sizes:
        logger.info(
            "CompilationConfig.compile_sizes: %s instead of %s, because no graph is captured of a size that it names",
            sizes,
            compilation.compile_sizes,
        )
    compilation.compile_sizes = sizes  # vLLM leaves None if graphs are not captured, and then finds no graph
    if device.inductor == CPP:
        compilation.inductor_compile_config = {**CPP_OPTIONS, **compilation.inductor_compile_config}
    if device.inductor == CPP and compilation.inductor_compile_config.get("combo_kernels"):
        logger.info("CompilationConfig.inductor_compile_config: combo_kernels is off, because they are for GPUs")
        compilation.inductor_compile_config["combo_kernels"] = False


def _divide_ranges(compilation: CompilationConfig) -> None:
    """Compile batches separately if first choices leave their products to PyTorch, so that no view of these remains."""
    begin = boundary("linear") if has_passes(compilation) else None
    if begin is None or begin < 3:  # vLLM divides above one token
        return
    compilation.compile_ranges_endpoints = sorted({*(compilation.compile_ranges_endpoints or ()), begin - 1})
    logger.info(
        "CompilationConfig.compile_ranges_endpoints: %s, because PyTorch multiplies from %d tokens on",
        compilation.compile_ranges_endpoints,
        begin,
    )


def leave_to_inductor(vllm_config: VllmConfig, device: DeviceSpec) -> None:
    """Run the reference, fused by Inductor, if the first-choice kernels are slower than that.

    See :func:`fl_dispatch.hosting.compilation.inductor.fused`.
    """
    compilation, policy = vllm_config.compilation_config, get_policy()
    if not (is_compiled(vllm_config) and compilation.backend == DEFAULT_BACKEND and device.inductor == CPP):
        return
    operators = inductor.fused(OPERATORS)
    orders = dict.fromkeys(operators, ("reference", "vendor", "flagos"))
    origins = {f"per_op_order.{op}": Origin("compilation, because Inductor fuses the reference") for op in operators}
    per_op_order, origins = (*policy.per_op_order, *orders.items()), {**policy.origins, **origins}
    set_global_policy(replace(policy, per_op_order=per_op_order, origins=origins))
    if operators:
        logger.info("%s: the reference runs, because Inductor fuses it", ", ".join(operators))


# -- start ------------------------------------------------------------------------------------------------------------


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Run a model's own forward without compilation in this block."""
    wrappers: list[Any] = [part for part in model.modules() if not getattr(part, "do_not_compile", True)]
    with ExitStack() as stack:
        for wrapper in wrappers:
            stack.enter_context(replaced(wrapper, do_not_compile=True))
        yield


def start(model: nn.Module, vllm_config: VllmConfig) -> None:
    """Wrap the model in ``torch.compile`` if vLLM leaves that to the model runner; the next forward compiles."""
    from vllm.config import CompilationMode

    if is_compiled(vllm_config):
        kernel_numbers.share_equal()
        whole_graphs.load()
    if vllm_config.compilation_config.mode == CompilationMode.STOCK_TORCH_COMPILE:
        from vllm.compilation.wrapper import compile_model_with_stock_torch

        compile_model_with_stock_torch(model, vllm_config)


def enter_cache_key(vllm_config: VllmConfig, manifest_hash: str) -> None:
    """Add the frozen choices to vLLM's compile-cache key, so that no graph with other choices is loaded."""
    vllm_config.additional_config[MANIFEST_KEY] = manifest_hash  # in place, because copies for a model's parts share it
    compilation = vllm_config.compilation_config
    if compilation.cache_dir:  # vLLM uses a user's directory without a key
        compilation.cache_dir = os.path.join(compilation.cache_dir, manifest_hash)
        logger.info("CompilationConfig.cache_dir: %s, because graphs belong to these choices", compilation.cache_dir)


def warm_up_sizes(vllm_config: VllmConfig, default: int) -> list[int]:
    """Return batch sizes, in tokens, for dummy runs that compile everything: one for all ranges, and each size."""
    limit = vllm_config.scheduler_config.max_num_batched_tokens
    sizes = [size for size in vllm_config.compilation_config.compile_sizes or () if size <= limit]
    return [min(default, limit), *sizes]


def counts() -> dict[str, int]:
    """Return vLLM's counters of this process, and PyTorch's: compilations and loads since the process began."""
    from torch._dynamo.utils import counters
    from vllm.compilation.counter import compilation_counter

    ahead = counters["aot_autograd"]
    distinct = ahead["ok"] + ahead["autograd_cache_hit"]
    return {
        **asdict(compilation_counter),
        "graphs": counters["stats"]["unique_graphs"],
        "distinct": distinct,
        "rotations": joined_calls["rotary_embedding"],
        "fused products": joined_calls[FUSED],
    }


def report(vllm_config: VllmConfig, before: Mapping[str, int]) -> dict[str, Any]:
    """Count the compilations since the counters stood at ``before``, as plain data.

    ``graphs`` were traced by Dynamo; vLLM splits them at attention layers into ``pieces``. ``compilations`` counts
    requests for a piece's code, and ``distinct`` counts codes that Inductor made or loaded: equal pieces share one.
    ``loaded`` and ``saved`` are whole models, from and to vLLM's cache; a loaded one is not split. ``rotations`` were
    fused with the write of keys and values in pieces that Inductor made, not in loaded ones. ``fused products`` were
    fused with norms and gates in the same way. ``captured`` is the number of tokens up to which batches have graphs.
    """
    now, compilation = counts(), vllm_config.compilation_config
    grown = {name: value - before[name] for name, value in now.items()}
    return {
        "mode": compilation.mode.name,
        "backend": compilation.backend,
        "graphs": grown["graphs"],
        "pieces": grown["num_piecewise_capturable_graphs_seen"],
        "compilations": grown["num_backend_compilations"],
        "distinct": grown["distinct"],
        "loaded": grown["num_aot_artifacts_loaded"],
        "saved": grown["num_aot_artifacts_saved"],
        **({"rotations": grown["rotations"]} if getattr(compilation.pass_config, ROTATIONS, False) else {}),
        **({"fused products": grown["fused products"]} if grown["fused products"] else {}),
        **({"captured": compilation.max_cudagraph_capture_size} if is_captured(vllm_config) else {}),
    }
