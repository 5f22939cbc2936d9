"""Activations without weights, by the layer class names that hosts share: operator and parameters of each."""

from __future__ import annotations

from dataclasses import dataclass

from ..facts.fact import HostFact


@dataclass(frozen=True)
class Activation:
    """The call of an operator by a layer ``forward(x)``.

    Args:
        operator: its name; ``x`` is the first argument.
        attributes: names of the layer's attributes that are the next arguments.
        constants: the last arguments.
    """

    operator: str
    attributes: tuple[str, ...] = ()
    constants: tuple[str, ...] = ()

    def facts(self, owner: str, user: str) -> tuple[HostFact, ...]:
        """Return the fact that a host's class (``module:Class``) has these attributes; no fact without attributes."""
        if not self.attributes:
            return ()
        return (HostFact(owner, self.attributes, "reads", user, "The operator's arguments."),)


ACTIVATIONS = {
    "SiluAndMul": Activation("silu_and_mul"),
    "GeluAndMul": Activation("gelu_and_mul", ("approximate",)),
    "MulAndSilu": Activation("mul_and_silu"),
    "FatreluAndMul": Activation("fatrelu_and_mul", ("threshold",)),
    "SwigluOAIAndMul": Activation("swigluoai_and_mul", ("alpha", "limit")),
    "SiluAndMulWithClamp": Activation("silu_and_mul_with_clamp", ("swiglu_limit", "alpha", "beta")),
    "SwigluStepAndMul": Activation("swiglustep_and_mul", ("limit",)),
    "SituAndMul": Activation("situ_and_mul", ("beta", "linear_beta")),
    "GeluAndMulSparse": Activation("gelu_and_mul_sparse", ("std_multiplier", "approximate")),
    "GELU": Activation("gelu", constants=("none",)),
    "GELUTanh": Activation("gelu", constants=("tanh",)),
    "NewGELU": Activation("gelu", constants=("tanh",)),
    "FastGELU": Activation("gelu", constants=("tanh",)),
    "QuickGELU": Activation("quick_gelu"),
    "ReLU2": Activation("relu2"),
    "ReLUSquaredActivation": Activation("relu2"),
}


def operators_name(layers: str) -> str:
    """Return an operator's name for an activation that layers know under one of two names."""
    return "silu" if layers == "swish" else layers
