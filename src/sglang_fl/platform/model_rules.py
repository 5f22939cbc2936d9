"""SGLang's rules for models that it ties to a list of its own attention backends, extended by ours.

SGLang reads the list after it has asked the platform, and fails if the backend is not listed. While SGLang applies its
rules, such a model gets the name of a listed backend with the same features as ours, and ours again afterwards.

It also fails if the prefix cache of a model with states has larger pages than one token, so such a model has none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from fl_dispatch.logger_manager import get_logger

from ..compat.runtime import ATTENTION

logger = get_logger(__name__)

TIED = ("GptOssForCausalLM",)
"""The models with such a list that are served."""
LISTED = "triton"
"""A backend in all lists, with windows and sinks like ours."""
KEPT = ("dtype", "moe_runner_backend")
"""Arguments that SGLang's rules for gpt-oss set for its own kernels."""


def name_listed(args: Any, config: Any) -> Mapping[str, Any]:
    """Return the arguments of a tied model: a listed backend, and the rest as before SGLang's own rules."""
    from sglang.srt.arg_groups.overrides import resolving_view

    view = resolving_view(args)
    if view.attention_backend != ATTENTION:
        return {}
    return {"attention_backend": LISTED, **{name: getattr(view, name) for name in KEPT}}


def keep_ours(args: Any, apply: Callable[[Any], None]) -> None:
    """Let SGLang apply its rules for a model, and keep our attention, with its pages."""
    from sglang.srt.arg_groups.overrides import declare_resolution, model_config_of, resolving_view
    from sglang.srt.configs.hybrid_arch import mambaish_config

    view = resolving_view(args)
    before, pages = view.attention_backend, view.page_size or 1
    if pages > 1 and not view.disable_radix_cache and mambaish_config(model_config_of(args)) is not None:
        logger.info("no prefix is remembered: SGLang remembers states in pages of one token, not %d", pages)
        declare_resolution(args, __name__, disable_radix_cache=True)
    apply(args)
    changed = before == ATTENTION != resolving_view(args).attention_backend
    if changed and model_config_of(args).hf_config.architectures[0] in TIED:
        declare_resolution(args, __name__, attention_backend=ATTENTION)


@cache
def register() -> None:
    """Register both rules with SGLang. Idempotent."""
    from sglang.srt.arg_groups.overrides import register_model_override
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    for architecture in TIED:
        register_model_override(architecture)(name_listed)
    register_resolution_hook("handle_model_specific_adjustments")(keep_ours)
