"""Let vLLM's loaders of weights keep an account of a checkpoint's tensors.

vLLM compares names only in models that are not quantized, and not the parts of joined layers. Its table of loaders is
the one place that every load passes, for a model and for its draft model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

from torch import Tensor, nn
from vllm.model_executor.models.utils import WeightsMapper

from fl_dispatch.hosting.layers.attribute import replaced
from fl_dispatch.hosting.loading.account import Account
from fl_dispatch.hosting.loading.refusals import naming

from .. import checkpoint


class CountedLoader:
    """A loader of a format, before vLLM's own; it counts no weights that are loaded into a running engine."""

    fl_account: Account | None = None

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        """Load, then refuse parameters that the checkpoint did not fill.

        Raises:
            CheckpointError: a parameter is not filled, or a tensor has another kind of numbers.
        """
        account = self.fl_account = checkpoint.open_account(model, model_config)
        if account is None:
            super().load_weights(model, model_config)  # type: ignore[misc]
            return
        try:
            with naming(account), account.watching(), _noting(account.dropped):
                super().load_weights(model, model_config)  # type: ignore[misc]
        finally:
            self.fl_account = None
        checkpoint.close_account(account, model, model_config)

    def track_weights_loading(self, *args: Any, **kwargs: Any) -> None:
        """Run vLLM's comparison of names without the layers that it excuses; ours follows, and also names the files."""

    def get_all_weights(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        weights: Iterator[tuple[str, Tensor]] = super().get_all_weights(*args, **kwargs)  # type: ignore[misc]
        return weights if self.fl_account is None else self.fl_account.see(weights)

    def _prepare_weights(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._prepare_weights(*args, **kwargs)  # type: ignore[misc]
        if self.fl_account is not None:
            self.fl_account.files += found if isinstance(found, list) else found[1]
        return found


def _noting(dropped: set[str]) -> AbstractContextManager[None]:
    """Collect the names that a model's mapper drops, because its class declares these tensors unused."""
    map_name = WeightsMapper._map_name_with_shard

    def noted(mapper: WeightsMapper, key: str) -> Any:
        found = map_name(mapper, key)
        if found is None:
            dropped.add(key)
        return found

    return replaced(WeightsMapper, _map_name_with_shard=noted)


@cache
def _counted(loader: type) -> type:
    return type(f"{loader.__name__}FL", (CountedLoader, loader), {"__module__": __name__})


def count() -> None:
    """Put our part before each of vLLM's loaders that passes a checkpoint's tensors to the model. Idempotent."""
    from vllm.model_executor import model_loader

    table = model_loader._LOAD_FORMAT_TO_MODEL_LOADER
    for name, loader in table.items():
        if hasattr(loader, "get_all_weights") and not issubclass(loader, CountedLoader):
            table[name] = _counted(loader)
