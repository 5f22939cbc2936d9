"""Engines on a GPU are cold starts, because what they import there starts threads, which a fork would lose."""

from __future__ import annotations

import processes

processes.always_cold = True
