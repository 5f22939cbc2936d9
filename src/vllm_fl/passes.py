"""The passes that run over a graph that vLLM's compilation hands to Inductor."""

from __future__ import annotations

from torch.fx import Graph
from vllm.compilation.passes.pass_manager import PostGradPassManager
from vllm.compilation.passes.vllm_inductor_pass import VllmInductorPass
from vllm.config import VllmConfig


class KeepFunctional(VllmInductorPass):
    """Takes the place of vLLM's last pass, which saves copies around its own compiled operators.

    That pass reads them from ``torch.ops._C``, where they only are with vLLM's CUDA library, and our layers call none
    of them. Inductor undoes functionalization of every other operator by itself.
    """

    def __call__(self, graph: Graph) -> None:
        """Leave the graph as it is."""


class PassManagerFL(PostGradPassManager):
    """vLLM's pass manager without the pass that needs vLLM's compiled library."""

    def configure(self, config: VllmConfig) -> None:
        super().configure(config)
        self.fix_functionalization = KeepFunctional(config)
