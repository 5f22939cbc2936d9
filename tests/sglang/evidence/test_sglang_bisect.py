"""``fl bisect`` finds what is planted in a real SGLang: one that the commit draws, in ``make test-all`` each."""

from __future__ import annotations

import pytest

from bisecting import OF_ATEN, SHOWN, SLOW, PlantedFaults
from fl_dispatch.cli.bisect.selftest import TESTS
from sampling import drawn


@pytest.mark.engine
class TestFaults(PlantedFaults):
    FAULTS = drawn(
        [fault for fault in (*SHOWN, *OF_ATEN, *SLOW) if not TESTS[fault].compiled], 1, "planted faults, SGLang"
    )
