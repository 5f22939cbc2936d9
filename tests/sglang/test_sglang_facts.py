"""The table of what this package relies on in SGLang is complete; that SGLang has it: ``test_host_check.py``."""

from __future__ import annotations

import sglang_fl
from overridden import assert_parameters, overridden, unlisted
from sglang_fl.host_facts import FACTS, HOOKED


def test_every_name_of_the_host_that_a_class_of_ours_overrides_is_listed(host: None) -> None:
    assert unlisted(FACTS, list(overridden(sglang_fl, "sglang"))) == set()


def test_our_methods_take_the_parameters_that_the_table_says(host: None) -> None:
    assert assert_parameters(FACTS, list(overridden(sglang_fl, "sglang")), "0.5.21") > 25


def test_what_is_hooked_is_what_the_table_says(host: None) -> None:
    from sglang_fl import compat

    said = {f"{fact.owner}.{name}" for fact in HOOKED if fact.concerns("0.5.21") for name in fact.plain_names}
    assert {hook.target for hook in compat.all_hooks()} == {target.replace(":", ".") for target in said}
