"""Set the plugin's defaults in SGLang's server arguments, each logged with its reason, before a process starts."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from fl_dispatch.devices import DeviceSpec, device_specs
from fl_dispatch.hosting.memory import kv_layout
from fl_dispatch.hosting.start import handover
from fl_dispatch.logger_manager import get_logger
from fl_dispatch.settings import get_settings

from .. import speculation
from ..compat.runtime import ATTENTION
from ..host import HOST
from ..layers import lora
from ..speculation import several_steps
from ..version import TESTED_HOSTS, host_version

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

logger = get_logger(__name__)


def apply_defaults(args: ServerArgs, device: DeviceSpec) -> None:
    """Set defaults for this device if the user chose nothing."""
    multiple = kv_layout.preference().multiple
    defaults = {
        "device": device.torch_type,
        **({"page_size": multiple} if multiple > 1 else {}),
        "attention_backend": ATTENTION,
        **({} if HOST.name in device.host_kernels else {"sampling_backend": "pytorch"}),
    }
    if args.prefill_attention_backend is not None and args.decode_attention_backend is not None:
        del defaults["attention_backend"]
    for field, value in defaults.items():
        if getattr(args, field) is None:
            setattr(args, field, value)
    for spec in device_specs():
        if spec.torch_type == device.torch_type and HOST.name in spec.host_attention:
            _take_back_attention(args, spec.host_attention[HOST.name])
    speculation.apply_defaults(args, _set)
    several_steps.apply_defaults(args, _set)
    _adapt_graphs(args, device)
    _set(args, "disable_custom_all_reduce", True, "it is a CUDA kernel")
    if HOST.name in device.host_kernels and args.tp_size > 1 and get_settings().registers("RMSNorm", "rms_norm"):
        _set(args, "enforce_disable_flashinfer_allreduce_fusion", True, "it computes norms in the place of operators")
    _set(args, "disable_hybrid_swa_memory", True, "sglang_fl keeps one pool for layers with and without a window")
    if not device.accelerator:
        if args.enable_lora or args.lora_paths:
            _set(args, "lora_backend", lora.BACKEND, "the others are Triton kernels")
        _cpu_defaults(args)


def _take_back_attention(args: ServerArgs, host: str) -> None:
    """Replace the attention backend that SGLang chose for the device, before it asked us, by ours.

    SGLang chooses it in ``set_default_server_args`` for an NPU, and in ``handle_cpu_backends`` for a CPU.
    """
    for field in ("attention_backend", "prefill_attention_backend", "decode_attention_backend"):
        if getattr(args, field) == host:
            _set(args, field, ATTENTION, f"'{host}' is SGLang's own code for this device, not operators")


def _adapt_graphs(args: ServerArgs, device: DeviceSpec) -> None:
    """Enable only the graphs of our operators that SGLang's own runners can capture.

    SGLang has already read its graph flags when it asks us, and reads these values later.
    """
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase

    graphs = args.cuda_graph_config
    for phase in Phase.ALL:
        before = graphs[phase].backend
        wanted, reason = _graphs_of(phase, args, device)
        if before not in (wanted, Backend.DISABLED):
            logger.info("graphs of %s: '%s' instead of '%s', because %s", phase, wanted, before, reason)
            graphs = with_phase(graphs, phase, backend=wanted)
    args.cuda_graph_config = graphs


def _graphs_of(phase: str, args: ServerArgs, device: DeviceSpec) -> tuple[str, str]:
    """Return the kind of graphs to capture for a phase, and why not another kind."""
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase

    for absent, reason in (
        (not device.graphs, f"{device.name} has no graphs to capture"),
        (HOST.name not in device.host_kernels, "sglang_fl captures none yet"),
        (args.speculative_algorithm not in (None, several_steps.NAME), "sglang_fl makes and checks drafts eagerly"),
    ):
        if absent:
            return Backend.DISABLED, reason
    if phase == Phase.DECODE:
        return Backend.FULL, "sglang_fl captures decoding as a whole"
    version = host_version()
    for absent, reason in (
        (version not in TESTED_HOSTS, f"sglang_fl does not know those of SGLang {version}"),
        (args.enable_lora or args.lora_paths, "sglang_fl reads prompts for adapters eagerly"),
        (args.pp_size > 1, "sglang_fl reads prompts eagerly in stages of a pipeline"),
        (args.tp_size > 1, "sglang_fl reads prompts eagerly on several ranks"),
    ):
        if absent:
            return Backend.DISABLED, reason
    return Backend.BREAKABLE, "sglang_fl leaves attention of prompts out of graphs"


def _cpu_defaults(args: ServerArgs) -> None:
    """Set the variable that SGLang requires to bind the threads of several ranks to cores."""
    ranks, cores = args.tp_size * args.pp_size * args.dp_size, sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // ranks)
    parts = [cores[(rank * share) % len(cores) :][:share] for rank in range(ranks)]
    binding = "|".join(",".join(map(str, part)) for part in parts)
    _set_variable("SGLANG_CPU_OMP_THREADS_BIND", binding if ranks > 1 else None)
    _set_variable("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // ranks)))


_variables: dict[str, str] = {}
"""Variables that :func:`_set_variable` has set for an earlier engine of this process, not for the user."""


def _set_variable(name: str, value: str | None) -> None:
    """Set an environment variable that the user has not set; ``None`` removes the value of an earlier engine."""
    if name in os.environ and os.environ[name] != _variables.get(name):
        return
    _variables.pop(name, None)
    os.environ.pop(name, None)
    if value is not None:
        logger.info("%s: %s, for the ranks of this engine", name, value)
        os.environ[name] = _variables[name] = value


def _set(args: ServerArgs, field: str, value: Any, reason: str) -> None:
    before = getattr(args, field)
    if before != value:
        logger.info("%s: %s instead of %s, because %s", field, value, before, reason)
        setattr(args, field, value)


def hand_over() -> None:
    """Leave settings and policy for the processes that SGLang starts next."""
    handover.offer()
