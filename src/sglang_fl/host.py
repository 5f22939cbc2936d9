"""The plugin's knowledge of SGLang, for ``tools/host_check.py`` and for the names in a user's lists.

Importing this module imports nothing of SGLang.
"""

from __future__ import annotations

from fl_dispatch.hosting.facts import yaml_file
from fl_dispatch.hosting.facts.fact import HostFact
from fl_dispatch.hosting.facts.host import Host, HostLayers

from .bridge import NATIVE, PENDING, ROWS
from .bridge.linear import MODULE, NAMES

FUSED_OP = "sglang.kernels.fused_op:BaseFusedOp"
"""The class that asks its instances for their forward, from SGLang 0.5.20 on."""

HOST = Host(
    name="SGLang",
    package="sglang",
    plugin="sglang_fl",
    facts=lambda: yaml_file.facts("sglang_fl", "sglang", (fact for row in ROWS for fact in row.facts)),
    layers=HostLayers(
        roots=(FUSED_OP,),
        replaced=frozenset({*(f"{row.module}:{row.name}" for row in ROWS), *(f"{MODULE}:{name}" for name in NAMES)}),
        left=NATIVE,
        inherited=True,
        pending=PENDING,
    ),
)


def hooked() -> tuple[HostFact, ...]:
    """Return the facts about hooks, for any version of SGLang; ``why`` is the reason in messages about a hook."""
    return tuple(fact for section in yaml_file.written("sglang_fl") for fact in section.facts if fact.verb == "hooks")
