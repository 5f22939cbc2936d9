"""The package's knowledge of SGLang, for ``tools/host_check.py`` and for the names in a user's lists.

Importing it imports nothing of SGLang.
"""

from __future__ import annotations

from fl_dispatch.hosting.layers.classes import Host, HostLayers

from .bridge import BRIDGES, NATIVE, PENDING
from .host_facts import FACTS, FUSED_OP
from .layers.linear import MODULE, NAMES

HOST = Host(
    name="SGLang",
    package="sglang",
    facts=(*FACTS, *(fact for row in BRIDGES for fact in row.facts)),
    layers=HostLayers(
        roots=(FUSED_OP,),
        replaced=frozenset({*(f"{row.module}:{row.name}" for row in BRIDGES), *(f"{MODULE}:{name}" for name in NAMES)}),
        left=NATIVE,
        inherited=True,
        pending=PENDING,
    ),
)
