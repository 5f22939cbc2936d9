"""A check of a checkpoint's ``quantization_config`` before a host reads it: the form of values, and settings.

:func:`.schemes.served` judges the settings of single layers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from . import orders, remedies, schemes
from .blocks import warn_of_powers_of_two
from .schemes import EXPRESSION, Refused

MODELOPT = ("FP8", "MXFP8", "NVFP4", "W4A16_NVFP4")
"""The served number formats of ``modelopt``."""


def check(method: str, config: Mapping[str, Any], refused: Refused) -> None:
    """Refuse unserved settings of all layers in a checkpoint's configuration, before a host reads it.

    Args:
        method: the format's name.
        config: ``quantization_config``.
        refused: the host's error.

    Raises:
        Exception: by ``refused``.
    """
    if wrong := next(_malformed(method, config), ""):
        raise refused(f"{wrong} in 'quantization_config'")
    groups = (config.get("config_groups") or {}).values()
    if method == "fp8" and "fp8" not in (named := config["quant_method"]):
        raise refused("'fp8' for a checkpoint that is not quantized")
    if method == "fp8" and "mxfp8" in named:
        raise refused(f"quantization '{named}'")
    if method == "fp8" and (stored := config.get("store_dtype")):
        raise refused(f"experts stored as '{stored}' in 'fp8'")
    if method == "modelopt" and (algorithm := schemes.modelopt_algorithm(config)) not in MODELOPT:
        said = f"with '{algorithm}'" if algorithm else "without 'quant_algo'"
        raise refused(f"'modelopt' {said}", remedies.METHODS["modelopt"])
    if method == "gptq":
        schemes.served(schemes.gptq({"sym": True, "desc_act": False, **config}), "", refused)
    if method == "awq":
        if (version := str(config.get("version", "")).lower()) in remedies.UNUSUAL_VERSIONS:
            raise refused(f"'awq' of version '{version}'", remedies.VERSION)
        if (bits := config.get("w_bit", config.get("bits"))) != 4:
            raise refused(f"'awq' with {bits} bits", remedies.AWQ_BITS)
    if (sparse := (config.get("sparsity_config") or {}).get("format", "dense")) != "dense":
        raise refused(f"sparse weights of compressed-tensors ('{sparse}')", remedies.DENSE)
    if config.get("linear_fp8_config"):
        raise refused("compressed-tensors with 'linear_fp8_config'")
    for group in groups:
        weights, form = group.get("weights") or {}, group.get("format") or config.get("format")
        if (order := weights.get("actorder")) in orders.REORDERED:
            raise refused(f"compressed-tensors with actorder '{order}'", remedies.ORDER)
        if weights.get("type") == "int" and form == schemes.STORED_FORM and not group.get("input_activations"):
            raise refused(f"integer weights for inputs as they are in '{form}' of compressed-tensors", remedies.PACK)
    warn_of_powers_of_two(config)


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_table(value: Any) -> bool:
    return value is None or isinstance(value, Mapping)


def _is_names(value: Any) -> bool:
    names = value if isinstance(value, list) else [value or ""]
    return all(isinstance(name, str) for name in names)


def _are_layers(value: Any) -> bool:
    """Whether a value lists names of layers and expressions, or is ``None``."""
    names = value or []
    if not isinstance(names, list) or not _is_names(names):
        return False
    return all(_is_expression(name.removeprefix(EXPRESSION)) for name in names if name.startswith(EXPRESSION))


def _is_expression(text: str) -> bool:
    try:
        re.compile(text)
    except re.error:
        return False
    return True


def is_rule(value: Any) -> bool:
    """Whether a key and a value are an expression, with or without a sign, and a table."""
    pattern, changed = value
    if not isinstance(pattern, str) or not _is_expression(pattern.removeprefix("-:").removeprefix("+:")):
        return False
    return isinstance(changed, Mapping)


FORMS: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (("bits", "act_bits", "w_bit", "group_size", "q_group_size"), _is_number, "a whole number"),
    (("desc_act", "sym", "zero_point"), lambda value: isinstance(value, bool), "true or false"),
    (("quant_method", "packing_format", "data_type"), lambda value: isinstance(value, str), "a text"),
    (("block_name_to_quantize", "to_quant_block_names"), _is_names, "names"),
    (("exclude",), _are_layers, "a list of names and expressions"),
    (("config_groups", "sparsity_config", "dynamic", "extra_config", "global_quant_config"), _is_table, "a table"),
    (("activation_scheme",), lambda value: value in ("static", "dynamic"), "static or dynamic"),
    (
        ("weight_block_size",),
        lambda value: value is None or (isinstance(value, list) and len(value) == 2 and all(map(_is_number, value))),
        "two whole numbers",
    ),
)
"""Keys of a configuration, with the test of their values and the words for it."""
REQUIRED: Mapping[str, tuple[str, ...]] = dict.fromkeys(("gptq", "auto-round"), ("bits", "group_size"))
"""Format → keys without which a weight's format is unknown."""


def _malformed(method: str, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield each value of a configuration with a wrong form for its key."""
    yield from (f"no '{key}'" for key in REQUIRED.get(method, ()) if key not in config)
    for keys, fits, form in FORMS:
        yield from (f"'{key}': {config[key]!r}, not {form}," for key in keys if key in config and not fits(config[key]))
    for name, group in (config.get("config_groups") or {}).items():
        keys = ("weights", "input_activations") if isinstance(group, Mapping) else ()
        parts = {f".{key}": group.get(key) for key in keys} or {"": group}
        for key, part in parts.items():
            if not _is_table(part) or (not key and part is None):
                yield f"'config_groups.{name}{key}': {part!r}, not a table,"
    for name, said in (config.get("extra_config") or {}).items():
        if not isinstance(said, Mapping):
            yield f"'extra_config.{name}': {said!r}, not a table,"
        else:
            yield from (f"{wrong} of 'extra_config.{name}'" for wrong in _malformed("", said))
    if method == "gptq":
        rules = (config.get("dynamic") or {}).items()
        yield from (f"'dynamic': {rule!r}, not an expression with a table," for rule in rules if not is_rule(rule))
