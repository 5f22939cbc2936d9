"""vLLM's interface of a KV connector; each method calls the scheduler's or the worker's half."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole
from vllm.utils.network_utils import get_ip
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from .counts import TransferCounts, TransferMetrics
from .options import Options
from .orders import Orders, Outcomes
from .protocol.route import Address
from .scheduling import Scheduling
from .working import Working

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class P2pConnector(KVConnectorBase_V1):
    """A KV connector for vLLM that sends prompts' caches between engines with the same model division, rank by rank."""

    _cache_hit_source = CacheHitSource.P2P  # in vLLM's own counts of known tokens

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _refuse_unsupported(kv_cache_config)
        transfer, parallel = self._kv_transfer_config, vllm_config.parallel_config
        options = Options.of(transfer.kv_connector_extra_config)
        own = Address(get_ip(), transfer.kv_port)
        produces, consumes = transfer.is_kv_producer, transfer.is_kv_consumer
        self.fl_blocks = kv_cache_config.num_blocks
        block_size = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        self.fl_scheduling: Scheduling | None = None
        self.fl_working: Working | None = None
        if role is KVConnectorRole.SCHEDULER:
            self.fl_scheduling = Scheduling(own, produces, consumes, block_size, parallel.world_size)
        else:
            model = vllm_config.model_config
            stages = parallel.pipeline_parallel_size
            divided = {"ranks": parallel.world_size, "stages": stages}
            facts = {"block_size": block_size, **divided, "model": model.architecture}
            self.fl_working = Working(own, parallel.rank, options, produces, consumes, facts)

    # -- in the scheduler ---------------------------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        self.fl_in_scheduler.arrived(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self.fl_in_scheduler.matched_tokens(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self.fl_in_scheduler.allocated(request, lambda: blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self.fl_in_scheduler.orders(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        if isinstance(outcomes := connector_output.kv_connector_worker_meta, Outcomes):
            self.fl_in_scheduler.apply_outcomes(outcomes)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self.fl_in_scheduler.finished(request.request_id)
        return False, None

    # Called by vllm_fl.damage.

    def fl_take_back(self, requests: Iterable[str] | None, why: str) -> None:
        """Inform receivers that data sent for these requests, or for all recent ones, is wrong."""
        self.fl_in_scheduler.take_back(requests, why)

    def fl_spoiled(self, connector_output: KVConnectorOutput) -> dict[int, str]:
        """Return local blocks with data that another engine has taken back, and why."""
        outcomes = connector_output.kv_connector_worker_meta
        return self.fl_in_scheduler.spoiled(outcomes) if isinstance(outcomes, Outcomes) else {}

    # -- in a worker --------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        self.fl_in_worker.register(kv_caches, self.fl_blocks)

    def get_handshake_metadata(self) -> None:
        self.fl_in_worker.started()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self.has_connector_metadata():
            self.fl_in_worker.begin(self.fl_orders)

    def wait_for_layer_load(self, layer_name: str) -> None:
        return None

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        return None

    def wait_for_save(self) -> None:
        if self.has_connector_metadata():
            self.fl_in_worker.end(self.fl_orders)

    def build_connector_worker_meta(self) -> Outcomes | None:
        return self.fl_in_worker.outcomes()

    def shutdown(self) -> None:
        if self.fl_working is not None:
            self.fl_working.close()

    # -- counts -------------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> TransferCounts | None:
        counts = self.fl_working.tally.take() if self.fl_working is not None else {}
        return TransferCounts(counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TransferCounts:
        return TransferCounts(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> TransferMetrics:
        return TransferMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @property
    def fl_in_scheduler(self) -> Scheduling:
        assert self.fl_scheduling is not None
        return self.fl_scheduling

    @property
    def fl_in_worker(self) -> Working:
        assert self.fl_working is not None
        return self.fl_working

    @property
    def fl_orders(self) -> Orders:
        orders = self._get_connector_metadata()
        assert isinstance(orders, Orders)
        return orders


def _refuse_unsupported(kv_cache_config: KVCacheConfig) -> None:
    """Refuse caches that this connector cannot send; ``vllm_fl.platform.refusals`` has checked the rest.

    Raises:
        ValueError: for such a cache, named in one sentence.
    """
    groups = kv_cache_config.kv_cache_groups
    asked = (
        (len(groups) != 1, "models with layers that keep their caches in different ways"),
        (not all(map(_whole, groups)), "layers that do not keep the keys of all tokens"),
    )
    for present, feature in asked:
        if present:
            raise ValueError(f"the P2P connector does not support {feature}")


def _whole(group: Any) -> bool:
    """Whether each layer of a group keeps keys and values of all tokens."""
    spec = group.kv_cache_spec
    specs: Iterable[Any] = getattr(spec, "kv_cache_specs", {"": spec}).values()
    return all(isinstance(one, FullAttentionSpec) for one in specs)
