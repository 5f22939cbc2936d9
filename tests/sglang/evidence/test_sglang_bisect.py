"""``fl bisect`` finds what is planted in a real SGLang: one that the commit draws, in ``make test-all`` each."""

from __future__ import annotations

import pytest

from bisecting import SHOWN, PlantedFaults
from sampling import drawn


@pytest.mark.engine
class TestFaults(PlantedFaults):
    FAULTS = drawn(SHOWN, 1, "planted faults, SGLang")
