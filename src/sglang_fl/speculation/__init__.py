"""Speculation under SGLang: the algorithms that run, and their parts that SGLang brings for its own devices only.

SGLang's workers run unchanged. They verify drafts with their own kernels, and :mod:`~sglang_fl.speculation.forms` has
PyTorch forms of these: for kernels that NVIDIA's compiler compiles during serving, and for Triton kernels without a
Triton driver. Attention of several tokens of a request is causal, so drafts are verified as chains, and each draft of a
tree as a separate request.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .. import quantization
from ..version import TESTED_HOSTS, host_version
from . import several_steps

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

    from fl_dispatch.devices import DeviceSpec

BY_MODEL = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE")
"""Algorithms that draft with a model; SGLang treats NEXTN as another name of EAGLE."""
BY_LOOK_UP = "NGRAM"
SERVED = (*BY_MODEL, BY_LOOK_UP)
BOTH_WAYS = ("DFLASH", "DSPARK")
"""Algorithms with drafts that attend to each other in both directions (``models/dflash.py``)."""
STEPS = 3
"""Default number of drafts of a step: SGLang's number for most models."""


def named(args: ServerArgs) -> str | None:
    """Return the algorithm that the user asks for."""
    return args.speculative_algorithm and args.speculative_algorithm.upper()


def serves(algorithm: str) -> bool:
    """Whether the installed SGLang runs an algorithm."""
    return algorithm in SERVED and host_version() in TESTED_HOSTS


def unserved(args: ServerArgs, device: DeviceSpec, kernels: bool) -> list[tuple[Any, str]]:
    """Return ``(present, feature)`` for every refused feature of speculation.

    Args:
        kernels: whether SGLang has its own kernels for the device.
    """
    algorithm = named(args)
    if algorithm is None or (algorithm == several_steps.NAME and several_steps.largest() > 1):
        return []
    what = f"speculative decoding with '{algorithm}'"
    if not serves(algorithm):
        both = "its drafts attend both ways: _get_dflash_layer_attention_params in models/dflash.py"
        why = f" under SGLang {host_version()}" if algorithm in SERVED else f" ({both})" * (algorithm in BOTH_WAYS)
        return [(True, what + why)]
    backend, mode = args.speculative_draft_attention_backend, args.speculative_attention_mode
    cache, quantized = args.speculative_draft_kv_cache_dtype, args.speculative_draft_model_quantization
    return [
        (device.accelerator and not kernels, what),
        (args.speculative_adaptive, "--speculative-adaptive"),
        (args.enable_multi_layer_eagle, "--enable-multi-layer-eagle"),
        (args.speculative_use_block_verification, "--speculative-use-block-verification"),
        (args.speculative_draft_window_size is not None, "--speculative-draft-window-size"),
        (args.speculative_ngram_external_corpus_path is not None, "--speculative-ngram-external-corpus-path"),
        (backend is not None, f"--speculative-draft-attention-backend {backend}"),
        (cache not in (None, args.kv_cache_dtype), f"--speculative-draft-kv-cache-dtype {cache}"),
        (
            quantized not in (None, "unquant", *quantization.SERVED),
            f"--speculative-draft-model-quantization {quantized}",
        ),
        (args.speculative_token_map is not None, "--speculative-token-map"),
        (mode != "prefill", f"--speculative-attention-mode {mode}"),
        (args.enable_lora or args.lora_paths, f"LoRA and {what}"),
        (args.pp_size > 1, f"pipeline stages and {what}"),
        (args.dp_size > 1, f"data-parallel ranks and {what}"),
    ]


def apply_defaults(args: ServerArgs, change: Callable[[ServerArgs, str, Any, str], None]) -> None:
    """Make drafts chains, unless the user chose otherwise.

    Args:
        change: sets a field and logs the reason.
    """
    algorithm = named(args)
    if algorithm in BY_MODEL:
        chosen = (args.speculative_num_steps, args.speculative_eagle_topk, args.speculative_num_draft_tokens)
        if chosen == (None, None, None):
            args.speculative_num_steps, args.speculative_num_draft_tokens = STEPS, STEPS + 1
        if args.speculative_eagle_topk is None and args.speculative_num_steps is not None:
            args.speculative_eagle_topk = 1
    elif algorithm == BY_LOOK_UP:
        for field in ("speculative_ngram_max_bfs_breadth", "speculative_ngram_min_bfs_breadth"):
            change(args, field, 1, "sglang_fl checks drafts that are chains, not trees")
    if algorithm is not None:
        change(args, "disable_overlap_schedule", True, "sglang_fl's attention reads each step's lengths on the host")
