"""The passes over a graph that vLLM's compilation passes to Inductor."""

from __future__ import annotations

import torch
from torch.fx import Graph, Node
from vllm.compilation.passes.inductor_pass import get_pass_context
from vllm.compilation.passes.pass_manager import PostGradPassManager
from vllm.compilation.passes.vllm_inductor_pass import VllmInductorPass
from vllm.config import VllmConfig
from vllm.config.utils import Range

from fl_dispatch import get_default_manager
from fl_dispatch.hosting.start.first_choices import reference_from

from ..attention.dense import ROTATION
from . import compile, one_token, one_token_graph, quantized_results, rotary_cache

aten = torch.ops.aten
PRODUCT = "linear"


class ReferenceProducts(VllmInductorPass):
    """Pass that replaces the view by PyTorch's product if it multiplies every batch of the graph's range.

    Prompts run outside captured graphs, where a view costs the host several times as much as a product.
    """

    def __call__(self, graph: Graph) -> None:
        """Replace the calls of products of two dimensions."""
        view, manifest = getattr(torch.ops.fl_dispatch, PRODUCT, None), get_default_manager().freezer.manifest
        if view is None or manifest is None:
            return
        fewest = get_pass_context().compile_range.start
        for node in graph.find_nodes(op="call_function", target=view.default):
            x, weight, bias, scope = node.args
            begin = reference_from(manifest, PRODUCT, scope or None)
            if begin is not None and begin <= fewest and x.meta["val"].dim() == 2:
                _multiply(graph, node, x, weight, bias)


def _multiply(graph: Graph, node: Node, x: Node, weight: Node, bias: Node | None) -> None:
    """Replace a view of our product by PyTorch's product."""
    with graph.inserting_before(node):
        transposed = graph.call_function(aten.permute.default, (weight, [1, 0]))
        transposed.meta["val"] = weight.meta["val"].permute(1, 0)
        if bias is None:
            product = graph.call_function(aten.mm.default, (x, transposed))
        else:
            product = graph.call_function(aten.addmm.default, (bias, x, transposed))
    product.meta.update(node.meta)
    node.replace_all_uses_with(product)
    graph.erase_node(node)


class JoinOneToken(VllmInductorPass):
    """Pass that fuses products with norms and gates if the range is one token, see :mod:`.one_token_graph`."""

    def __init__(self, config: VllmConfig) -> None:
        super().__init__(config)
        self.products = one_token.joined_products(config)

    def is_applicable_for_range(self, compile_range: Range) -> bool:
        """Whether there is one token in every batch."""
        return bool(self.products) and compile_range.start == compile_range.end == 1

    def __call__(self, graph: Graph) -> None:
        """Replace the calls."""
        compile.joined_calls[compile.FUSED] += one_token_graph.join(graph, self.products)


class JoinQuantization(VllmInductorPass):
    """Pass that fuses norms and gated activations with their results' quantization, see :mod:`.quantized_results`."""

    def __call__(self, graph: Graph) -> None:
        """Replace the calls."""
        quantized_results.join(graph)


class JoinRotation(VllmInductorPass):
    """Pass that fuses rotations with the write of keys and values, see :mod:`.rotary_cache`."""

    def __call__(self, graph: Graph) -> None:
        """Replace the calls."""
        compile.joined_calls[ROTATION] += rotary_cache.join(graph)


class KeepFunctional(VllmInductorPass):
    """An empty pass in place of vLLM's last one, which saves copies around its own compiled operators.

    vLLM's pass reads them from ``torch.ops._C``, which has them only with vLLM's CUDA library; our layers call none of
    them. Inductor undoes the functionalization of all other operators.
    """

    def __call__(self, graph: Graph) -> None:
        """Leave the graph unchanged."""


class PassManagerFL(PostGradPassManager):
    """vLLM's pass manager without the pass that needs vLLM's compiled library."""

    def configure(self, config: VllmConfig) -> None:
        with quantized_results.without_hosts_passes(config.compilation_config.pass_config):
            super().configure(config)
        self.passes += [JoinOneToken(config), ReferenceProducts(config), JoinQuantization(config)]
        if getattr(config.compilation_config.pass_config, compile.ROTATIONS, False):
            self.passes.append(JoinRotation(config))
        self.fix_functionalization = KeepFunctional(config)
