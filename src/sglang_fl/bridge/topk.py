"""``TopK`` over the operators ``topk_softmax``, ``topk_sigmoid`` and ``grouped_topk``.

Steps after the choice are SGLang's: its capture of routed experts, the placement of experts, its recorder. On an
out-of-tree platform its own code omits placement and padding or fails; here they work as on its GPUs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fl_dispatch.hosting.facts.fact import release

from ..version import host_version
from .base import Bridge, Unbridged

PLACEMENTS = ("static", "dynamic")


def refusal(layer: Any) -> str | None:
    """Return why no operator of this project computes a layer's routing, or ``None``."""
    from sglang.srt.environ import envs

    config = layer.topk_config
    if config.custom_routing_function is not None:
        return "routing by the model's own function"
    if _shared_slots(config) or layer.enable_waterfill:
        return "shared experts among the routed ones"
    if config.scoring_func not in ("softmax", "sigmoid"):
        return f"routing by '{config.scoring_func}'"
    if envs.SGLANG_SIMULATE_UNIFORM_EXPERTS.get() or envs.SGLANG_SIMULATE_ROUND_ROBIN_EXPERTS.get():
        return "simulated routing"
    plain_softmax = not config.use_grouped_topk and config.scoring_func == "softmax"
    if config.apply_routed_scaling_factor_on_output and plain_softmax and not _scales_all_weights():
        return "scaled weights by softmax"
    return None


def _scales_all_weights() -> bool:
    """Whether SGLang scales all weights; before 0.5.23 it scales normalized ones of groups, and by sigmoid on GPUs."""
    return release(host_version()) >= release("0.5.23")


def _shared_slots(config: Any) -> int:
    """Return the result's columns that are shared experts; 0.5.23 renamed the field."""
    name = "num_shared_topk_slots" if hasattr(config, "num_shared_topk_slots") else "num_fused_shared_experts"
    return int(getattr(config, name))


class TopKBridge(Bridge):
    """``forward(hidden_states, router_logits, *, num_token_non_padded, expert_location_dispatch_info,
    dynamic_expert_bias)``; 0.5.22 added ``router_logits_partials``.
    """

    fl_choices = ("topk_softmax", "topk_sigmoid", "grouped_topk")

    def __init__(self, layer: Any, *args: Any) -> None:
        from sglang.srt.eplb import expert_location_dispatch
        from sglang.srt.layers.moe import topk

        if (reason := refusal(layer)) is not None:
            raise Unbridged(reason)
        self.host, self.to_physical = topk, expert_location_dispatch.topk_ids_logical_to_physical
        config = layer.topk_config
        self.fl_operator = "grouped_topk" if config.use_grouped_topk else f"topk_{config.scoring_func}"
        self.factor: float = config.routed_scaling_factor or 1.0
        self.scales_all = _scales_all_weights()
        super().__init__(layer, *args)

    def route(self, router_logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights and logical numbers of the experts, ``[tokens, top_k]``."""
        config = self.layer.topk_config
        bias, scaled = config.correction_bias, config.apply_routed_scaling_factor_on_output
        if config.use_grouped_topk:
            return self.fl_call(
                router_logits,
                config.top_k,
                config.num_expert_group,
                config.topk_group,
                config.renormalize,
                "sigmoid" if bias is not None else config.scoring_func,  # with a bias SGLang supports only this one
                self.factor if scaled and (config.renormalize or self.scales_all) else 1.0,
                bias,
            )
        weights, ids = self.fl_call(router_logits, config.top_k, config.renormalize, bias)
        return weights * self.factor if scaled else weights, ids

    def inputs(self, unpadded: Tensor | None, placement: Any) -> tuple[Tensor | None, Any]:
        """Return the number of tokens without padding, and the experts' placement, if it moves any.

        From 0.5.23 on the layer finds them itself if its model does not pass them.
        """
        find = getattr(self.layer, "_resolve_routing_inputs", None)
        if find is None:
            return unpadded, placement
        given = placement is not None
        unpadded, placement = find(unpadded, placement)
        moves = placement is not None and (
            given or self.host.is_expert_remapping_enabled() or placement.ep_dispatch_algorithm not in PLACEMENTS
        )
        return unpadded, placement if moves else None

    def forward(
        self,
        hidden_states: Tensor,
        router_logits: Tensor,
        *,
        num_token_non_padded: Tensor | None = None,
        expert_location_dispatch_info: Any = None,
        dynamic_expert_bias: Tensor | None = None,
        **newer: Any,
    ) -> Any:
        """Return SGLang's ``StandardTopKOutput``; padding tokens go to expert -1."""
        layer: Any = self.layer
        config = layer.topk_config
        given = {
            "num_token_non_padded": num_token_non_padded,
            "expert_location_dispatch_info": expert_location_dispatch_info,
            "dynamic_expert_bias": dynamic_expert_bias,
        }
        if asked := {name: value for name, value in newer.items() if value is not None}:
            return self.fall_through(" and ".join(asked), hidden_states, router_logits, **given, **asked)
        num_token_non_padded, placement = self.inputs(num_token_non_padded, expert_location_dispatch_info)
        reason = None
        if dynamic_expert_bias is not None:
            reason = "a bias for each token"
        elif placement is not None and placement.ep_dispatch_algorithm not in PLACEMENTS:
            reason = f"experts placed by '{placement.ep_dispatch_algorithm}'"
        elif config.use_grouped_topk and not _fits(router_logits.shape[-1], config):
            reason = "more experts a token than its groups have"
        if reason is not None:
            return self.fall_through(reason, hidden_states, router_logits, **given)
        weights, ids = self.route(router_logits)
        self.host.capture_routed_experts_if_allowed(config, layer.layer_id, ids)
        if placement is not None:
            ids = self.to_physical(ids, placement)
        if num_token_non_padded is not None:
            padding = torch.arange(len(ids), device=ids.device) >= num_token_non_padded
            ids = ids.masked_fill(padding.unsqueeze(-1), -1)
        self.host.get_global_expert_distribution_recorder().on_select_experts(topk_ids=ids)
        return self.host.StandardTopKOutput(weights, ids, router_logits)


def _fits(experts: int, config: Any) -> bool:
    """Whether the groups that a token may use are equal and have enough experts."""
    size, rest = divmod(experts, config.num_expert_group)
    return not rest and config.top_k <= config.topk_group * size and (config.correction_bias is None or size > 1)
