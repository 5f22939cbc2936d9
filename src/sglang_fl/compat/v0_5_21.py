"""Platform questions of SGLang up to 0.5.21. This file can be deleted with the support of these versions."""

from __future__ import annotations

from . import native_kernels


class OlderPlatform:
    """The questions that became ``get_kv_pool_cls(kind=)`` and fields of ``capabilities``."""

    def get_kv_pool_cls(self, *, kind: str) -> type:
        raise NotImplementedError

    def get_mha_kv_pool_cls(self) -> type:
        return self.get_kv_pool_cls(kind="mha")

    def get_mla_kv_pool_cls(self) -> type:
        return self.get_kv_pool_cls(kind="mla")

    def get_dsa_kv_pool_cls(self) -> type:
        return self.get_kv_pool_cls(kind="dsa")

    def support_cuda_graph(self) -> bool:
        return native_kernels.capture()

    def support_piecewise_cuda_graph(self) -> bool:
        return False
