"""Rules of valid values: how a variable's text becomes plain data, and plain data a setting's value.

``Rule`` and the annotations in the table of items give the types of plain data; pydantic checks them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from fl_dispatch.errors import ConfigError

from . import names, platforms
from .place import Place, show
from .selection_policy import PREFERENCES, TunedRule

Plain = Any
TOKENS = ("flagos", "impl:IMPL_ID", "reference", "vendor", "vendor:NAME")
DTYPES = ("bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "int8", "int32", "int64", "bool")
PHASES = ("prefill", "decode")
SHADOW_ACTIONS = ("log", "ban")
DAMAGE_ACTIONS = ("recompute", "end", "ignore")
_NAME = re.compile(r"[^\s=|;,@]+")
_PATTERN = re.compile(r"[\w.*?\[\]!-]+")
_LEVELS = {"WARN": "WARNING", "FATAL": "CRITICAL", "NOTSET": "DEBUG"}
_BOOLEANS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


class When(BaseModel):
    """``when`` of a rule in ``op_tuned``."""

    model_config = ConfigDict(strict=True, extra="forbid")
    dtype: str | None = None
    tokens: list[int | None] | None = None
    phase: str | None = None


class Rule(BaseModel):
    """A rule in ``op_tuned``."""

    model_config = ConfigDict(strict=True, extra="forbid")
    when: When = When()
    order: list[str]


_RULE_KEYS = (*Rule.model_fields, *When.model_fields)


_MUST = {
    "bool_type": "must be true or false",
    "float_type": "must be a number",
    "string_type": "must be a string",
    "list_type": "must be a list",
    "dict_type": "must be a mapping",
    "model_type": "must be a mapping",
    "missing": "is missing",
}


def typed(kind: Any, plain: Plain, place: Place) -> Any:
    """Return plain data of the given type.

    Raises:
        ConfigError: the data has another type; the message names the first wrong part.
    """
    try:
        return TypeAdapter(kind).validate_python(plain, strict=True)
    except ValidationError as error:
        raise _type_error(error, place) from None


def _type_error(error: ValidationError, place: Place) -> ConfigError:
    first = error.errors(include_url=False, include_context=False)[0]
    where = place.at(*first["loc"])
    if first["type"] == "extra_forbidden":
        return where.error(f"unknown key; {names.nearest(str(first['loc'][-1]), _RULE_KEYS)}")
    must = _MUST.get(first["type"], first["msg"])
    return where.error(must if first["type"] == "missing" else f"{must}, not {show(first['input'])}")


# -- variables: text to plain data ------------------------------------------------------------------------------------


def text(text: str, place: Place) -> str:
    """Return the text unchanged."""
    return text


def host_level(text: str, place: Place) -> str:
    """Return our name of a log level that Python names differently."""
    return _LEVELS.get(text.upper(), text)


def boolean(text: str, place: Place) -> bool:
    """Parse 1/0, true/false, yes/no, on/off, ignoring case."""
    try:
        return _BOOLEANS[text.casefold()]
    except KeyError:
        raise place.error(f"{show(text)} is no boolean; valid: 1/0, true/false, yes/no, on/off") from None


def number(text: str, place: Place) -> float:
    """Parse a number, such as ``0.01``."""
    try:
        return float(text)
    except ValueError:
        raise place.error(f"{show(text)} is no number") from None


def whole(text: str, place: Place) -> int:
    """Parse a whole number, such as ``8``."""
    try:
        return int(text)
    except ValueError:
        raise place.error(f"{show(text)} is no whole number") from None


def comma_list(text: str, place: Place) -> list[str]:
    """Parse ``a, b``."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise place.error(f"{show(text)} names nothing; unset the variable instead")
    return parts


def per_op(text: str, place: Place) -> dict[str, list[str]]:
    """Parse ``op=a|b;op2=x``."""
    orders: dict[str, list[str]] = {}
    for part in filter(None, (part.strip() for part in text.split(";"))):
        key, equals, order = part.partition("=")
        key = key.strip()
        if not equals:
            raise place.error(f"{show(part)} is not of the form op=token|token")
        if key in orders:
            raise place.at(key).error("is there twice")
        orders[key] = [token.strip() for token in order.split("|")] if order.strip() else []
    if not orders:
        raise place.error(f"{show(text)} names nothing; unset the variable instead")
    return orders


# -- checks: plain data to values -------------------------------------------------------------------------------------


def as_is(value: Any, place: Place) -> Any:
    """Return the value unchanged, because its type says all."""
    return value


def choice(what: str, valid: Iterable[str], value: str, place: Place) -> str:
    """Check one of a few words, ignoring case."""
    for word in valid:
        if word.casefold() == value.casefold():
            return word
    raise place.error(f"Invalid {what} value {show(value)}; {names.nearest(value, valid)}")


def within(least: float, most: float, value: float, place: Place) -> float:
    """Check a number between two bounds, inclusive."""
    if not least <= value <= most:
        raise place.error(f"must be between {least:g} and {most:g}, not {show(value)}")
    return value


def platform(value: str, place: Place) -> str:
    """Check a platform that has a file."""
    if value not in platforms.list_platforms():
        raise place.error(f"unknown platform {show(value)}; {names.nearest(value, platforms.list_platforms())}")
    return value


def path(value: str, place: Place) -> Path:
    """Return a path; ``~/`` is the home directory."""
    try:
        return Path(value).expanduser() if value.startswith("~/") else Path(value)
    except RuntimeError:  # no HOME, and a user id without an account, as in some containers
        raise place.error(f"{show(value)}: there is no home directory; write the whole path") from None


def name_set(check: Callable[[str, Place], None], values: list[str], place: Place) -> frozenset[str]:
    """Check names one by one, and return their set."""
    for index, name in enumerate(values):
        _well_formed(name, place.at(index))
        check(name, place.at(index))
    return frozenset(values)


def _well_formed(name: str, place: Place) -> None:
    if not _NAME.fullmatch(name):
        raise place.error(f"{show(name)} is not a name")


def patterns(values: list[str], place: Place) -> frozenset[str]:
    """Return shell patterns of dotted names."""
    for index, pattern in enumerate(values):
        if not _PATTERN.fullmatch(pattern):
            raise place.at(index).error(f"{show(pattern)} is no pattern of a name")
    return frozenset(values)


def modules(values: list[str], place: Place) -> tuple[str, ...]:
    """Check modules, or functions in them: ``package.module``, ``package.module:function``."""
    for index, name in enumerate(values):
        module, _, function = name.partition(":")
        if not all(part.isidentifier() for part in (*module.split("."), *(function.split(".") if function else ()))):
            raise place.at(index).error(f"{show(name)} is not the name of a module")
    return tuple(values)


def check_order(tokens: list[str], place: Place) -> tuple[str, ...]:
    """Check an order of tokens.

    Raises:
        ConfigError: the order is empty, or has an invalid token.
    """
    if not tokens:
        raise place.error("the order is empty, so nothing could run")
    for index, token in enumerate(tokens):
        inside = place.at(index)
        kind, colon, name = token.partition(":")
        if not (token in PREFERENCES or (colon and kind in ("vendor", "impl") and _NAME.fullmatch(name))):
            raise inside.error(f"unknown token {show(token)}; {names.nearest(token, TOKENS)}")
        if colon and kind == "vendor":
            names.check_vendor(name, inside)
    return tuple(tokens)


def token(value: str, place: Place) -> str:
    """Check one token."""
    return check_order([value], place)[0]


def _op_key(key: str, place: Place) -> None:
    op, at, scope = key.partition("@")
    if not _NAME.fullmatch(op) or (at and not _NAME.fullmatch(scope)):
        raise place.error(f"{show(key)} is not an operator, or operator@scope")
    names.check_operator(op, place)


def op_orders(value: dict[str, list[str]], place: Place) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Check operators, which may have a scope, and the order of each."""
    orders = []
    for key, tokens in value.items():
        _op_key(key, place.at(key))
        orders.append((key, check_order(tokens, place.at(key))))
    return tuple(orders)


def op_rules(value: dict[str, list[Rule]], place: Place) -> tuple[tuple[str, tuple[TunedRule, ...]], ...]:
    """Check operators, which may have a scope, and the rules of each."""
    tuned = []
    for key, rules in value.items():
        inside = place.at(key)
        _op_key(key, inside)
        if not rules:
            raise inside.error("has no rules")
        for index, rule in enumerate(rules[:-1]):
            if not rule.when.model_dump(exclude_none=True):
                raise inside.at(index).error("has no condition, so the rules after it are never reached")
        tuned.append((key, tuple(_rule(rule, inside.at(index)) for index, rule in enumerate(rules))))
    return tuple(tuned)


def _rule(rule: Rule, place: Place) -> TunedRule:
    when, inside = rule.when, place.at("when")
    tokens = None
    if when.tokens is not None:
        shape = "must be [least, most] with 0 <= least <= most, or most null"
        wrong = inside.at("tokens").error(f"{shape}, not {show(when.tokens)}")
        if len(when.tokens) != 2 or when.tokens[0] is None:
            raise wrong
        tokens = (when.tokens[0], when.tokens[1])
        if tokens[0] < 0 or (tokens[1] is not None and tokens[1] < tokens[0]):
            raise wrong
    return TunedRule(
        order=check_order(rule.order, place.at("order")),
        dtype=None if when.dtype is None else choice("dtype", DTYPES, when.dtype, inside.at("dtype")),
        tokens=tokens,
        phase=None if when.phase is None else choice("phase", PHASES, when.phase, inside.at("phase")),
    )
