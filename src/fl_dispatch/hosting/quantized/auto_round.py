"""AutoRound's own format: words in the order of ``gptq`` or ``awq``, and rules of its own for single layers.

Both hosts read such a checkpoint as one of the format that packs its words. The library's rules hold (auto_round
0.16.1, ``inference/convert_model.py``): first a layer's own name, then expressions in the file's order, found anywhere
in a name, then the list of quantized blocks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from . import remedies
from .schemes import Refused

PACKINGS: Mapping[str, str] = {"auto_round:auto_gptq": "gptq", "auto_round:auto_awq": "awq"}
"""``packing_format`` → the format with the same order of words."""
SPECIAL = re.compile(r"[*+?^$()\[\]{}|\\]")
"""Characters of expressions; a name has none."""
ROOTS = r"(?:(?:model|language_model)\.)*"
"""Modules around a model's blocks, which checkpoints and hosts have in different orders."""
WHOLE = 16
"""The bits of a layer that is left as it is."""


def as_packed(config: Mapping[str, Any], refused: Refused) -> tuple[str, dict[str, Any]]:
    """The format that packs a checkpoint's words, and ``quantization_config`` in the words of that format.

    Args:
        config: ``quantization_config`` of an ``auto-round`` checkpoint.
        refused: the host's error.

    Raises:
        Exception: by ``refused``, for numbers, packings and rules that no served format has.
    """
    packing = config.get("packing_format", "auto_round:auto_gptq")
    numbers, own = config.get("data_type", "int"), config.get("extra_config") or {}
    if numbers != "int" or config.get("act_bits", WHOLE) < WHOLE:
        raise refused(f"'auto-round' with numbers of '{numbers}'", remedies.AUTO_ROUND_FLOATS)
    if packing not in PACKINGS:
        raise refused(f"'auto-round' with packing_format '{packing}'", remedies.AUTO_ROUND)
    for name, said in own.items():
        if not isinstance(said, Mapping):
            raise refused(f"'extra_config.{name}': {said!r}, not a table, in 'quantization_config'")
    method, bits = PACKINGS[packing], config.get("bits")
    packed = {key: config[key] for key in ("bits", "group_size") if key in config}
    packed |= {"quant_method": method, "lm_head": own.get("lm_head", {}).get("bits", WHOLE) < WHOLE}
    if method == "gptq":
        return method, {**packed, "desc_act": False, "sym": config.get("sym", True), "dynamic": dict(_rules(config))}
    left = [name for name, said in own.items() if said.get("bits", bits) >= WHOLE]
    if unfit := [name for name in own if name not in left or SPECIAL.search(name)]:
        raise refused(f"'auto-round' with a rule of its own for '{unfit[0]}' in the order of awq", remedies.AUTO_ROUND)
    return method, {
        **packed,
        "zero_point": not config.get("sym", True),
        "version": "gemm",
        "modules_to_not_convert": left,
    }


def _rules(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Rules as ``dynamic`` of ``gptq`` has them: the first that matches counts, from the start of a name."""
    own: Mapping[str, Mapping[str, Any]] = config.get("extra_config") or {}
    for name in sorted(own, key=lambda name: bool(SPECIAL.search(name))):
        pattern = f".*(?:{name})" if SPECIAL.search(name) else f"{_named(name)}$"
        said = {key: own[name][key] for key in ("bits", "group_size", "sym") if key in own[name]}
        yield ("-:" if said.get("bits", 0) >= WHOLE else "+:") + pattern, said
    blocks = config.get("block_name_to_quantize") or config.get("to_quant_block_names") or ()
    if blocks:
        names = blocks.split(",") if isinstance(blocks, str) else blocks
        yield f"-:(?!(?:{'|'.join(map(_named, names))})\\.)", {}


def _named(name: str) -> str:
    """An expression for the name of a module, whichever roots are before it."""
    return ROOTS + re.escape(re.sub(f"^{ROOTS}", "", name))
