"""The tables of a rotary embedding as Transformers computes them from a configuration, to compare with a host's.

Our table replaces a host's if its class ignores a field of ``rope_parameters``, or has fewer rows than texts have
tokens. Configurations with fields that Transformers' own functions do not know are not judged.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor

from ...logger_manager import get_logger
from .configurations import is_of_transformers

logger = get_logger(__name__)

FIELDS = {
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings"),
    *("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    *("short_factor", "long_factor", "low_freq_factor", "high_freq_factor", "mrope_section", "mrope_interleaved"),
}
"""Fields of ``rope_parameters`` that Transformers' shared functions know; the axes change no table."""
SAME = {"deepseek_yarn": "yarn", "su": "longrope", "mrope": "default"}
"""Hosts' names for kinds of rotations → Transformers' names."""
FURTHEST = 4096
"""The last position at which tables are compared."""
ALLOWED = {torch.float32: 4e-3, torch.float64: 4e-3, torch.float16: 4e-3, torch.bfloat16: 1e-2}
"""The difference of a cosine that rounding explains, by the table's dtype, for a scale of 1."""
DECODER_LAYER = re.compile(r"^(?:(?:model|language_model|transformer|gpt_neox)\.)*(?:layers|h)\.(\d+)\.")


@dataclass(frozen=True)
class Rotation:
    """A rotation that a configuration states.

    Args:
        kind: Transformers' ``rope_type``.
        inverse: ``[frequencies]``, float32, radians per token.
        scale: factor of cosines and sines.
    """

    kind: str
    inverse: Tensor
    scale: float

    def table(self, first: int, rows: int) -> Tensor:
        """Return rows ``[rows, cos | sin]`` from a position on, float32."""
        return self.at(torch.arange(first, first + rows))

    def at(self, positions: Tensor) -> Tensor:
        """Return the rows ``[positions, cos | sin]``, float32, of positions ``[positions]`` of any type."""
        angles = positions.to(torch.float32)[:, None] * self.inverse
        return torch.cat((angles.cos(), angles.sin()), -1) * self.scale


class Rotating(Protocol):
    """A host's layer with a table ``[positions, cos | sin]``."""

    cos_sin_cache: Tensor


def parameters(config: Any, layer: int | None = None) -> dict[str, Any] | None:
    """Return the fields that a configuration states for a layer; ``None`` if some are unknown, or there are none."""
    stated = getattr(config, "rope_parameters", None)
    types = getattr(config, "layer_types", None) or ()
    if not isinstance(stated, dict):
        return None
    if set(stated) & set(types):
        stated = stated.get(types[layer]) if layer is not None and layer < len(types) else None
    known = isinstance(stated, dict) and set(stated) <= FIELDS and "rope_theta" in stated
    return dict(stated) if known and stated is not None else None


def rotation(config: Any, layer: int | None = None, length: int | None = None) -> Rotation | None:
    """Return Transformers' rotation of a layer.

    Args:
        config: the text model's configuration.
        layer: the layer's number.
        length: length of the whole text, if the kind depends on it.

    Returns:
        The rotation; ``None`` if Transformers' shared functions do not define it.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if layer is not None and (each := getattr(config, "per_layer_config", None)) is not None:
        config = each[layer]
    stated = parameters(config, layer)
    if stated is None:
        return None
    kind = stated.get("rope_type") or stated.get("type") or "default"
    kind = SAME.get(kind, kind)
    size = getattr(config, "qk_rope_head_dim", None) or getattr(config, "head_dim", None)
    size = size or config.hidden_size // config.num_attention_heads
    if kind == "default":
        rotated = int(size * stated.get("partial_rotary_factor", 1.0))
        steps = torch.arange(0, rotated, 2, dtype=torch.int64).to(torch.float32) / rotated
        return Rotation(kind, 1.0 / stated["rope_theta"] ** steps, 1.0)
    if kind not in ROPE_INIT_FUNCTIONS:
        return None
    longest = config.max_position_embeddings
    original = getattr(config, "original_max_position_embeddings", None)
    original = original or stated.get("original_max_position_embeddings") or longest
    read = SimpleNamespace(
        rope_parameters={**stated, "original_max_position_embeddings": original},
        head_dim=size,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        max_position_embeddings=longest,
        standardize_rope_params=lambda: None,
    )
    inverse, scale = ROPE_INIT_FUNCTIONS[kind](read, torch.device("cpu"), seq_len=length)
    return Rotation(kind, inverse.to(torch.float32), float(scale))


def limit(config: Any) -> int | None:
    """Return the tokens of the longest text that a table can hold; ``None`` if the rotation sets no limit.

    The kind ``dynamic`` derives the frequencies of a longer text from its length, so all keys change with every new
    token. A cache cannot hold such keys.
    """
    stated = parameters(config, 0)
    dynamic = stated is not None and (stated.get("rope_type") or stated.get("type")) == "dynamic"
    return int(config.max_position_embeddings) if dynamic else None


def too_long(asked: int, longest: int, remedy: str) -> str:
    """Return an error message about texts that are longer than :func:`limit`."""
    return (
        f"rope_type 'dynamic' turns texts of more than max_position_embeddings ({longest}) tokens by frequencies of "
        f"their own length, so no cache can hold their keys, and {asked} tokens are asked for: {remedy}"
    )


def difference(table: Tensor, stated: Rotation) -> float:
    """Return the largest difference of a host's table, as a multiple of the error that its dtype and the scale allow.

    Args:
        table: ``[rows, cos | sin]``, the first row for position 0.
        stated: the rotation that the configuration states.
    """
    if table.shape[1] != 2 * stated.inverse.shape[0]:
        return float("inf")
    places = [0, *(1 << power for power in range(FURTHEST.bit_length()) if 1 << power < table.shape[0])]
    wanted, has = stated.at(torch.tensor(places)), table[places].to("cpu", torch.float32)
    return float((has - wanted).abs().max()) / (ALLOWED[table.dtype] * max(1.0, stated.scale))


def layer_number(prefix: str) -> int | None:
    """Return the number of the decoder layer that contains a prefix; ``None`` for other parts of a model."""
    found = DECODER_LAYER.match(prefix)
    return None if found is None else int(found.group(1))


def correct(layers: Iterable[tuple[str, Rotating]], config: Any, length: int) -> None:
    """Give layers the table that the configuration states, if theirs differs or is too short.

    Args:
        layers: prefix and layer; a shared layer comes once for each prefix.
        config: the text model's configuration.
        length: tokens of the longest text that is served.

    Raises:
        ValueError: layers share a table, and the configuration states two.
    """
    replaced: Counter[str] = Counter()
    for prefix, layer, stated in _stated(layers, config):
        if stated.kind == "longrope":
            continue
        table, far = layer.cos_sin_cache, difference(layer.cos_sin_cache, stated)
        if far == float("inf"):
            say = logger.warning if is_of_transformers(config) else logger.debug
            say(
                "%s turns %d elements of a head, and the configuration (partial_rotary_factor, head_dim) says %d",
                *(prefix, table.shape[1], 2 * stated.inverse.shape[0]),
            )
            continue
        rows = max(table.shape[0], length)
        if far <= 1 and rows == table.shape[0]:
            continue
        layer.cos_sin_cache = stated.table(0, rows).to(table.device, table.dtype)
        reason = f"has {table.shape[0]} rows for {length} tokens" if far <= 1 else "differs from Transformers'"
        replaced[f"{type(layer).__name__} ({stated.kind}) {reason}"] += 1
    for said, count in replaced.items():
        logger.info("a table of %d of the class %s: they have the one that rope_parameters states", count, said)


def correct_long(layers: Iterable[tuple[str, Any]], config: Any, length: int) -> None:
    """Correct the tables of LongRoPE, which hold the part for long texts after the part for short ones.

    A layer has ``long_short_cos_sin_cache`` ``[positions, cos | sin]`` and ``original_max_position_embeddings``.
    """
    for prefix, layer, short in _stated(layers, config):
        split = layer.original_max_position_embeddings
        long = rotation(config, layer_number(prefix), split + 1)
        if long is None or short.kind != "longrope":
            continue
        table = layer.long_short_cos_sin_cache
        rows = max(table.shape[0] - split, length)
        far = max(difference(table[:split], short), difference(table[split:], long))
        if far > 1 or rows > table.shape[0] - split:
            joined = torch.cat((short.table(0, split), long.table(0, rows)))
            layer.long_short_cos_sin_cache = joined.to(table.device, table.dtype)
            logger.info(
                "the rotary tables of %s differ from Transformers' (factor, attention_factor), or are too short: "
                "it has those that rope_parameters states",
                prefix,
            )


def _stated(layers: Iterable[tuple[str, Any]], config: Any) -> Iterator[tuple[str, Any, Rotation]]:
    """Yield each layer once, with its first prefix and the rotation that the configuration states for all prefixes."""
    prefixes: dict[int, tuple[Any, list[str]]] = {}
    for prefix, layer in layers:
        prefixes.setdefault(id(layer), (layer, []))[1].append(prefix)
    for layer, names in prefixes.values():
        numbers = [number for name in names if (number := layer_number(name)) is not None]
        found = [rotation(config, number) for number in numbers]
        if not found or found[0] is None:
            continue
        for name, other in zip(names, found, strict=False):
            if other is None or other.scale != found[0].scale or not torch.equal(other.inverse, found[0].inverse):
                raise ValueError(
                    f"{names[0]} and {name} share one rotary table, and rope_parameters state two: the host's class "
                    f"{type(layer).__name__} does not read what is stated for each kind of layer"
                )
        yield names[0], layer, found[0]
