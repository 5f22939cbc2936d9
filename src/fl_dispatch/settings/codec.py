"""Frozen values as text for other processes: equal values have equal text, and the text gives the value back.

The types of a value's fields are the codec; sets and origins have no order or text, so types below stand for them.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, PlainSerializer, TypeAdapter

from .origins import Origin

T = TypeVar("T")
Names = Annotated[frozenset[str], PlainSerializer(sorted)]
FilePath = Annotated[Path, PlainSerializer(str)]  # it need not be Unicode, and JSON's escapes keep that
Origins = Annotated[
    Mapping[str, Origin],
    PlainSerializer(lambda origins: {name: origin.source for name, origin in origins.items()}),
    BeforeValidator(lambda plain: {name: Origin(source) for name, source in plain.items()}),
]
_adapter: Callable[[Any], TypeAdapter[Any]] = functools.cache(TypeAdapter)


def to_plain(value: Any) -> dict[str, Any]:
    """Return a frozen dataclass as data that JSON can hold."""
    plain: dict[str, Any] = _adapter(type(value)).dump_python(value, mode="json")
    return plain


def to_text(value: Any) -> str:
    """Return a frozen dataclass as JSON."""
    return json.dumps(to_plain(value))


def from_text(kind: type[T], text: str) -> T:
    """Return the value that :func:`to_text` wrote.

    Raises:
        ValueError: this version would not have written the text.
    """
    try:
        plain = json.loads(text)
        value: T = _adapter(kind).validate_python(plain)
    except (TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    written = to_plain(value)
    if plain != written:
        changed = sorted(str(name) for name in {*plain, *written} if plain.get(name) != written.get(name))
        raise ValueError(f"this version would not have written {', '.join(changed)}")
    return value
