"""AutoRound's format: int32 packed in the order of ``gptq`` or ``awq``, and rules for single layers.

Both hosts read such a checkpoint in the format with the same order. The library's rules apply (auto_round 0.16.1,
``inference/convert_model.py``): first a layer's own name, then expressions in the file's order, found anywhere in a
name, then the list of quantized blocks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from . import configurations, remedies, schemes
from .layer_parts import ROOTS, below_roots
from .schemes import Refused

PACKINGS: Mapping[str, str] = {"auto_round:auto_gptq": "gptq", "auto_round:auto_awq": "awq"}
"""``packing_format`` → the format that packs in the same order."""
SPECIAL = re.compile(r"[*+?^$()\[\]{}|\\]")
"""Characters of expressions; names have none of them."""
LEAVES = "-:"
"""The prefix of a ``dynamic`` rule for layers that are not quantized."""
CHANGES = "+:"
"""The prefix of other ``dynamic`` rules."""
WHOLE = 16
"""The bits of a layer that is not quantized."""


def as_packed(config: Mapping[str, Any], refused: Refused) -> tuple[str, dict[str, Any]]:
    """Return the format that packs as a checkpoint does, and ``quantization_config`` in the terms of that format.

    Args:
        config: ``quantization_config`` of an ``auto-round`` checkpoint.
        refused: the host's error.

    Raises:
        Exception: by ``refused``, for numbers, packings and rules that no served format has.
    """
    if (numbers := config.get("data_type", "int")) != "int":
        raise refused(f"'auto-round' with numbers of '{numbers}'", remedies.AUTO_ROUND_FLOATS)
    configurations.check("auto-round", config, refused)
    packing, own = config.get("packing_format", "auto_round:auto_gptq"), config.get("extra_config") or {}
    if (bits := config.get("act_bits", WHOLE)) < WHOLE:
        raise refused(f"'auto-round' with inputs of {bits} bits", remedies.AUTO_ROUND_FLOATS)
    if wrong := [name for name in own if SPECIAL.search(name) and not configurations.is_rule((name, {}))]:
        raise refused(f"'extra_config': {wrong[0]!r}, not an expression, in 'quantization_config'")
    if packing not in PACKINGS:
        raise refused(f"'auto-round' with packing_format '{packing}'", remedies.AUTO_ROUND)
    method, rules = PACKINGS[packing], dict(_rules(config))
    packed = {key: config[key] for key in ("bits", "group_size")}
    packed |= {"quant_method": method, "lm_head": own.get("lm_head", {}).get("bits", WHOLE) < WHOLE}
    if method == "gptq":
        return method, {**packed, "desc_act": False, "sym": config.get("sym", True), "dynamic": rules}
    if unfit := [name for name, said in own.items() if said.get("bits", 0) < WHOLE and name != "lm_head"]:
        raise refused(f"'auto-round' with a rule of its own for '{unfit[0]}' in the order of awq", remedies.AUTO_ROUND)
    left = [f"{schemes.EXPRESSION}{rule.removeprefix(LEAVES)}" for rule in rules if rule.startswith(LEAVES)]
    return method, {
        **packed,
        "zero_point": not config.get("sym", True),
        "version": "gemm",
        "modules_to_not_convert": left,
    }


def _rules(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield rules in the form of ``dynamic`` of ``gptq``: the first match from the start of a name counts."""
    own: Mapping[str, Mapping[str, Any]] = config.get("extra_config") or {}
    for name in sorted(own, key=lambda name: bool(SPECIAL.search(name))):
        pattern = f".*(?:{name})" if SPECIAL.search(name) else f"{_named(name)}$"
        said = {key: own[name][key] for key in ("bits", "group_size", "sym") if key in own[name]}
        yield (LEAVES if said.get("bits", 0) >= WHOLE else CHANGES) + pattern, said
    blocks = config.get("block_name_to_quantize") or config.get("to_quant_block_names") or ()
    if blocks:
        names = [name.strip() for name in (blocks.split(",") if isinstance(blocks, str) else blocks)]
        yield f"{LEAVES}(?!(?:{'|'.join(map(_named, names))})\\.)", {}


def _named(name: str) -> str:
    """Return an expression for the name of a module, with any roots before it."""
    return ROOTS + re.escape(below_roots(name))
