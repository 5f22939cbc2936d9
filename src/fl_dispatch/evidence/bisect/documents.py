"""Policies as YAML documents (``VLLM_FL_CONFIG``): of settings, of choices, and one that avoids culprits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from ...settings import Settings
from ...settings.selection_policy import TunedRule
from .choices import Branches, Choices, Site

Document = dict[str, Any]
OF_ATEN = ("aten_replacement", "flagos_blacklist")
"""Keys that decide which of PyTorch's own operators a backend replaces; :data:`BLACKLIST` removes single ones."""
OTHER_SETTINGS = (*OF_ATEN, "chip_features", "oot_blacklist")
"""Keys, besides the choice among implementations, that decide what runs; they apply from an engine's start on."""
BLACKLIST = "aten_blacklist"


def of_settings(settings: Settings) -> Document:
    """Return the document for these settings, as far as documents can express them; the others have variables."""
    policy = settings.policy
    document: Document = {"prefer": policy.prefer}
    if policy.strict:
        document["strict"] = True
    if policy.per_op_order:
        document["op_backends"] = {key: list(order) for key, order in policy.per_op_order}
    if policy.op_tuned:
        document["op_tuned"] = {key: [_rule(rule) for rule in rules] for key, rules in policy.op_tuned}
    if policy.allow_vendors is not None:
        document["allow_vendors"] = sorted(policy.allow_vendors)
    for key, names in (("deny_vendors", policy.deny_vendors), ("oot_blacklist", settings.oot_blacklist)):
        if names:
            document[key] = sorted(names)
    if policy.flagos_blacklist:
        document["flagos_blacklist"] = sorted(policy.flagos_blacklist)
    if settings.aten_blacklist:
        document[BLACKLIST] = sorted(settings.aten_blacklist)
    if settings.aten_replacement is not None:
        document["aten_replacement"] = settings.aten_replacement
    if not settings.chip_features:
        document["chip_features"] = False
    return document


def _rule(rule: TunedRule) -> dict[str, Any]:
    when = {"dtype": rule.dtype, "tokens": rule.tokens and list(rule.tokens), "phase": rule.phase}
    given = {key: value for key, value in when.items() if value is not None}
    return {**({"when": given} if given else {}), "order": list(rule.order)}


def other_settings(document: Document) -> Document:
    """Return the part of a document that is not a choice among implementations."""
    return {key: document[key] for key in OTHER_SETTINGS if key in document}


def of_choices(chosen: Mapping[Site, Branches], base: Document) -> Document:
    """Return the document that makes exactly these choices; ``base`` has its other settings."""
    by_op: dict[str, dict[Site, Branches]] = {}
    for site, branches in chosen.items():
        by_op.setdefault(site.op, {})[site] = branches
    backends: dict[str, list[str]] = {}
    tuned: dict[str, list[dict[str, Any]]] = {}
    for op, own in by_op.items():
        same = len(set(own.values())) == 1
        conditional = any(len(branches) > 1 for branches in own.values())  # an own order would beat such rules
        for site, branches in own.items():
            for key in (op,) if same else site.keys:
                if not conditional:
                    if branches[0][1]:
                        backends[key] = _tokens(branches[0][1])
                else:
                    tuned[key] = [_pinned(dict(when), ids) for when, ids in branches]
    parts = {"op_backends": backends, "op_tuned": tuned}
    kept = {BLACKLIST: base[BLACKLIST]} if base.get(BLACKLIST) else {}
    return {**other_settings(base), **kept, **{key: part for key, part in parts.items() if part}}


def _pinned(when: dict[str, Any], ids: Iterable[str]) -> dict[str, Any]:
    plain = {key: list(value) if isinstance(value, tuple) else value for key, value in when.items()}
    return {**({"when": plain} if plain else {}), "order": _tokens(ids)}


def _tokens(ids: Iterable[str]) -> list[str]:
    return [f"impl:{impl_id}" for impl_id in ids]


def avoiding(bad: Document, choices: Choices, orders: Mapping[Site, Branches], spare: Iterable[str]) -> Document:
    """Return the bad policy's document, with other orders at some sites.

    Args:
        bad: the document, unchanged everywhere else.
        choices: the bad policy's choices.
        orders: site → implementations that may run there instead; only the last branch counts, because a rule with
            conditions excludes no implementation.
        spare: vendors that must run now, and are removed from the lists of denied vendors.
    """
    document = {key: dict(value) if isinstance(value, dict) else value for key, value in bad.items()}
    backends: dict[str, list[str]] = dict(document.get("op_backends", {}))
    for op in sorted({site.op for site in orders}):
        own = {site: branches[-1][1] for site, branches in orders.items() if site.op == op}
        scoped = {site for site in choices.at if site.op == op and site.scope is not None}
        if {site for site in own if site.scope is not None} >= scoped and len(set(own.values())) == 1:
            backends = {key: order for key, order in backends.items() if key.partition("@")[0] != op}
            backends[op] = _tokens(next(iter(own.values())))
            continue
        for site, ids in own.items():
            backends.update(dict.fromkeys(site.keys, _tokens(ids)))
    if backends:
        document["op_backends"] = backends
    needed = {vendor.casefold() for vendor in spare}
    if "deny_vendors" in document:
        document["deny_vendors"] = [name for name in document["deny_vendors"] if name.casefold() not in needed]
    if "allow_vendors" in document:
        document["allow_vendors"] = sorted({*document["allow_vendors"], *needed})
    return document


def blacklisting(document: Document, operators: Iterable[str]) -> Document:
    """Return the document with further PyTorch operators that no backend replaces."""
    listed = sorted({*document.get(BLACKLIST, ()), *operators})
    return {**document, BLACKLIST: listed} if listed else document


def text(document: Document, head: str = "") -> str:
    """Return the document as YAML, below a comment."""
    comment = "".join(f"# {line}".rstrip() + "\n" for line in head.splitlines())
    return comment + yaml.safe_dump(document, sort_keys=False, width=150, allow_unicode=True)
