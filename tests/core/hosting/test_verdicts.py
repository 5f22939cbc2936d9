"""What becomes of a damaged request: it is computed again once and looked at, and then ends or goes on."""

from __future__ import annotations

from fl_dispatch.hosting.damage.verdicts import Verdict, Verdicts, of_numbers, of_wrong
from fl_dispatch.shadow.origin import Origin

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
