"""A plugin's contract with its host in two tables: facts that hold or fail, and layer classes without our version.

``fl doctor --host-contract`` prints the contract for installed hosts, ``tools/host_check.py`` for a wheel.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import packages_distributions, version
from typing import Any

from ..hosting.facts.fact import Findings, HostFact, check
from ..hosting.facts.host import Host, Judgement
from ..hosting.facts.source import SourceTree
from .output import print_table

PLUGINS = {"vllm": "vllm_fl", "sglang": "sglang_fl"}
"""A host's package → its plugin: module ``host`` has its facts and layers, ``environment`` the variables that it
refuses.
"""

OPEN = {"pending": "to do", "unjudged": "not judged"}
"""States of a layer class with work left, as shown in the table."""


def host_of(package: str) -> Host:
    """Return the plugin's description of a host."""
    found: Host = import_module(f"{PLUGINS[package]}.host").HOST
    return found


@dataclass(frozen=True)
class HostContract:
    """A plugin's table compared with one version of its host.

    Args:
        host: the plugin's description of its host.
        version: the host's version.
        findings: the facts that hold and those that fail.
        layers: the state of each layer class.
    """

    host: Host
    version: str
    findings: Findings
    layers: list[Judgement]

    @property
    def holds(self) -> bool:
        """Whether every fact about this version holds."""
        return not self.findings.broken

    def facts(self, *, all_facts: bool) -> Iterator[tuple[str, ...]]:
        """Return rows: state, our module, verb, the host's class or module, its expected or actual names, reason."""
        for broken in self.findings.broken:
            yield ("broken", *_whose(broken.fact), broken.what, broken.fact.why)
        for fact in self.findings.held if all_facts else ():
            yield ("ok", *_whose(fact), ", ".join(fact.plain_names), fact.why)

    def open_layers(self) -> Iterator[tuple[str, ...]]:
        """Return rows: state, class, module, missing part."""
        for state, words in OPEN.items():
            for found in self.layers:
                if found.state == state:
                    yield words, found.cls.node.name, found.cls.module.name, found.why

    def summary(self) -> str:
        """Return a summary in one line."""
        found, states = self.findings, Counter(judgement.state for judgement in self.layers)
        passed_over = [f"{len(found.of_other_versions)} facts of other versions"] if found.of_other_versions else []
        packages = ", ".join(sorted({fact.owner.partition(".")[0] for fact in found.elsewhere}))
        passed_over += [f"{len(found.elsewhere)} facts about {packages}"] if found.elsewhere else []
        return (
            f"{self.host.name} {self.version}: {found.names - len(found.broken)} of {found.names} names hold"
            + (f" (not looked at: {', '.join(passed_over)})" if passed_over else "")
            + f"; layer classes: {states['replaced']} run our operators, {states['left']} stay {self.host.name}'s "
            f"for a reason, {states['pending']} to do, {states['unjudged']} not judged"
        )

    def print(self, *, all_facts: bool) -> None:
        """Print both tables and the summary."""
        title = "Facts" if all_facts else "Facts that do not hold"
        facts, layers = list(self.facts(all_facts=all_facts)), list(self.open_layers())
        if facts:
            heads = ("state", "used by", "owner", "what is there", "why it is needed")
            rows = ((state, f"{user} {verb}", owner, what, why) for state, user, verb, owner, what, why in facts)
            print_table(f"{title}: {self.host.name} {self.version}", heads, rows)
        if layers:
            columns = ("state", "class", "module", "what is missing")
            print_table(f"Layer classes that run {self.host.name}'s code and may not have to", columns, layers)
        print(self.summary())

    def as_data(self) -> dict[str, Any]:
        """Return plain data."""
        fact_keys = ("state", "used_by", "verb", "owner", "what", "why")
        layer_keys = ("state", "class", "module", "why")
        return {
            "host": self.host.name,
            "version": self.version,
            "holds": self.holds,
            "facts": [dict(zip(fact_keys, row, strict=True)) for row in self.facts(all_facts=True)],
            "layers": [dict(zip(layer_keys, row, strict=True)) for row in self.open_layers()],
            "summary": self.summary(),
        }


def compare(host: Host, tree: SourceTree, version: str) -> HostContract:
    """Compare a plugin's facts with the source of its host."""
    return HostContract(host, version, check(host.facts(), tree, version), host.layers.judge(tree, host.package))


def installed() -> list[HostContract]:
    """Return the contract with each host that this environment would import."""
    trees = {package: SourceTree.installed(package, "torch") for package in PLUGINS}
    present = {package: tree for package, tree in trees.items() if package in tree.packages}
    distributions = packages_distributions() if present else {}
    return [compare(host_of(package), tree, version(distributions[package][0])) for package, tree in present.items()]


def _whose(fact: HostFact) -> tuple[str, str, str]:
    return fact.used_by, fact.verb, fact.owner
