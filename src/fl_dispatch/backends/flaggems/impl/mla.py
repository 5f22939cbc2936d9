"""``MLAFLBackend`` and ``MLAFLImpl``, which vLLM's plugin defines. Accessing one imports vLLM."""

from __future__ import annotations

from fl_dispatch.backends.elsewhere import names_of

__getattr__ = names_of("vllm_fl.attention.mla", "MLAFLBackend", "MLAFLImpl")
