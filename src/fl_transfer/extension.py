"""The entry point of this package: offer the KV connector and the backends of weight transfer to vLLM, by name.

The module imports neither, because vLLM's factories load a class when a user names it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fl_dispatch.hosting.facts import yaml_file

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from fl_dispatch.hosting.facts.fact import HostFact

CONNECTORS = "vllm.distributed.kv_transfer.kv_connector.factory"
CONNECTOR_MODULE = "fl_transfer.p2p.connector"
CONNECTOR = "P2pConnector"
NAMES = frozenset({CONNECTOR, "P2pNcclConnector"})
"""The connector's own name, and the name of vLLM's former connector."""
_offered: set[str] = set()

BACKENDS = "vllm.distributed.weight_transfer.factory"
BACKENDS_MODULE = "fl_transfer.weights"
ENGINES = {
    "fl_shm": ("SharedMemoryEngine", "SharedMemoryTrainer"),
    "fl_gloo": ("GlooEngine", "GlooTrainer"),
}
"""Backend → the worker's class and the trainer's."""


def facts() -> tuple[HostFact, ...]:
    """Return vLLM's names that the KV connector and the backends of weight transfer rely on."""
    return yaml_file.facts("fl_transfer", "vllm")


def offer() -> None:
    """Register all names with vLLM's factories. Idempotent."""
    _offer_connector()
    _offer_backends()


def _offer_connector() -> None:
    """Register the connector; a connector of vLLM keeps its name."""
    factory: Any = importlib.import_module(CONNECTORS).KVConnectorFactory
    for name in NAMES:
        if name not in factory._registry:
            factory.register_connector(name, CONNECTOR_MODULE, CONNECTOR)
            _offered.add(name)


def _offer_backends() -> None:
    """Register the backends of weight transfer, for workers and for trainers."""
    factory: Any = importlib.import_module(BACKENDS)
    factories = (factory.WeightTransferEngineFactory, factory.WeightTransferTrainerFactory)
    for backend, classes in ENGINES.items():
        for register, name in zip(factories, classes, strict=True):
            if backend not in register._registry:
                register.register_engine(backend, BACKENDS_MODULE, name)


def unserved(vllm_config: VllmConfig) -> list[tuple[bool, str]]:
    """Return features that the connector does not serve, each with whether this engine requests it.

    Raises:
        ConfigError: an option of the connector is unknown or wrong.
    """
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    if transfer is None:
        return []
    options = transfer.kv_connector_extra_config
    if not _is_ours(transfer.kv_connector, transfer.kv_connector_module_path):
        among = [
            (one.get("kv_connector"), one.get("kv_connector_module_path")) for one in options.get("connectors", ())
        ]
        return [(any(_is_ours(*one) for one in among), f"{CONNECTOR} as one of several connectors")]
    from .p2p.options import check

    check(options)
    model = vllm_config.model_config
    return [
        (parallel.data_parallel_size > 1, f"data parallelism (one engine for each rank is the way) with {CONNECTOR}"),
        (parallel.nnodes > 1, f"ranks on several machines with {CONNECTOR}"),
        (vllm_config.speculative_config is not None, f"speculative decoding with {CONNECTOR}"),
        (
            model is not None and (model.is_hybrid or model.is_attention_free),
            f"models with layers that keep a state with {CONNECTOR}",
        ),
    ]


def _is_ours(name: str | None, module: str | None = None) -> bool:
    """Whether vLLM's factory loads this package's connector for a user who names this module or none."""
    return module == CONNECTOR_MODULE if module else name in _offered
