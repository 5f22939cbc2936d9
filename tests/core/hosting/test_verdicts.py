"""What becomes of a damaged request: it is computed again once and looked at, and then ends or goes on."""

from __future__ import annotations

import torch

from fl_dispatch.hosting.damage.verdicts import Verdict, Verdicts, Wrong, of_numbers, of_wrong
from fl_dispatch.knowledge.failures import ArgumentKind
from fl_dispatch.shadow.findings import Findings
from fl_dispatch.shadow.origin import Origin
from fl_dispatch.types import BackendImplKind, OpImpl

WATCHED, UNWATCHED = True, False
GOES_ON, AGAIN, ENDS = Verdict.GOES_ON, Verdict.AGAIN, Verdict.ENDS


def test_damage_that_comes_again_ends_the_request_and_no_other() -> None:
    verdicts = Verdicts("recompute")
    assert verdicts.of("a", True, UNWATCHED, True) is AGAIN
    assert verdicts.of("b", False, UNWATCHED, True) is GOES_ON
    assert verdicts.of("a", False, WATCHED, False) is GOES_ON  # a part of its prompt
    assert verdicts.watched == {"a"}
    assert verdicts.of("a", True, WATCHED, True) is ENDS
    assert not verdicts.watched


def test_damage_that_does_not_come_again_is_repaired_or_ends_the_request() -> None:
    for action, verdict in (("recompute", GOES_ON), ("end", ENDS)):
        verdicts = Verdicts(action)
        assert verdicts.of("a", True, UNWATCHED, True) is AGAIN
        assert verdicts.of("a", False, WATCHED, True) is verdict
        assert not verdicts.watched


def test_the_reason_names_the_origin_on_each_rank() -> None:
    one, two = Origin("linear", "vendor.x", "layers.3"), Origin("rms_norm", "vendor.y", "")
    assert of_numbers(True, [one, two]) == (
        "its logits have NaN or infinity: they began in 'linear' by 'vendor.x' in layers.3 and 'rms_norm' by 'vendor.y'"
    )
    assert of_numbers(True, []).endswith("they began outside fl_dispatch")
    assert of_numbers(True, None) == "its logits have NaN or infinity"
    assert "did not come again" in of_numbers(False, [])
    assert of_wrong(["'a' by 'b'", "'c' by 'd'"]).endswith("these results were: 'a' by 'b'; 'c' by 'd'")


def test_an_implementation_that_differed_is_named_once_banned_or_not() -> None:
    findings = Findings()
    wrong = Wrong(findings)
    assert (wrong.new(), wrong.kept()) == ((), ())
    for layer in ("layers.0", "layers.1"):
        found_in(layer, findings)
        assert wrong.new() == ()
        assert wrong.kept() == (("'linear' by 'vendor.x'",) if layer == "layers.0" else ())
    found_in("layers.2", findings, name="vendor.y", banned=True)
    assert wrong.new() == ("'linear' by 'vendor.y'",)
    assert wrong.kept() == ()


def found_in(layer: str, findings: Findings, name: str = "vendor.x", banned: bool = False) -> None:
    """Add a finding about an implementation in a layer."""
    impl = OpImpl("linear", name, BackendImplKind.VENDOR, len, vendor="x")
    kind = ArgumentKind(torch.float32, 2, "contiguous", "cpu", layer)
    findings.add(impl, impl, kind, 3.0, "output 0 at [0]", "a consequence")
    if banned:
        findings.ban(impl, kind)
