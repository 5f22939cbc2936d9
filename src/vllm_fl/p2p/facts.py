"""Names that the connector relies on in vLLM, for the table of :mod:`vllm_fl.host_facts`."""

from __future__ import annotations

from fl_dispatch.hosting.host_facts import HostFact

_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector"
_BASE = f"{_CONNECTOR}.v1.base:KVConnectorBase_V1"
_METRICS = f"{_CONNECTOR}.v1.metrics"
_OUTPUT = "vllm.v1.core.sched.output"
_REQUEST = "vllm.v1.request:Request"

FACTS = (
    HostFact(
        f"{_CONNECTOR}.factory:KVConnectorFactory",
        ("_registry", "register_connector(name, module_path, class_name)"),
        "reads",
        "compat.p2p",
        "The connector is offered by name, once.",
    ),
    HostFact(
        _BASE,
        ("get_external_cache_hit_sources",),
        "reads",
        "compat.p2p",
        "A version without it lacks what the connector needs, and is not offered it.",
        since="0.32",
    ),
    HostFact(
        _BASE,
        (
            "_cache_hit_source",
            "on_new_request(request)",
            "get_num_new_matched_tokens(request, num_computed_tokens)",
            "update_state_after_alloc(request, blocks, num_external_tokens)",
            "build_connector_meta(scheduler_output)",
            "update_connector_output(connector_output)",
            "request_finished(request, block_ids)",
            "register_kv_caches(kv_caches)",
            "start_load_kv(forward_context, **kwargs)",
            "wait_for_layer_load(layer_name)",
            "save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)",
            "wait_for_save()",
            "build_connector_worker_meta()",
            "shutdown()",
            "get_kv_connector_stats()",
            "build_kv_connector_stats(data=None)",
            "build_prom_metrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)",
        ),
        "overrides",
        "p2p.connector",
        "A connector is called by these in the scheduler and in workers.",
        since="0.32",
    ),
    HostFact(
        _BASE,
        ("_kv_transfer_config", "_get_connector_metadata", "has_connector_metadata"),
        "reads",
        "p2p.connector",
        "The user's configuration, and a step's orders.",
        since="0.32",
    ),
    HostFact(
        "vllm.v1.metrics.cache_hit_source:CacheHitSource",
        ("P2P",),
        "reads",
        "p2p.connector",
        "The name under which vLLM counts tokens that came from another engine.",
        since="0.32",
    ),
    HostFact(
        "vllm.v1.outputs:KVConnectorOutput",
        ("kv_connector_worker_meta",),
        "reads",
        "p2p.connector",
        "What workers answer to orders.",
        since="0.32",
    ),
    HostFact(
        "vllm.v1.kv_cache_interface:KVCacheConfig",
        ("num_blocks", "kv_cache_groups"),
        "reads",
        "p2p.connector",
        "The blocks of a worker's cache.",
    ),
    HostFact(
        "vllm.v1.core.kv_cache_manager:KVCacheBlocks",
        ("get_block_ids",),
        "reads",
        "p2p.connector",
        "The blocks that a request has.",
    ),
    HostFact(
        "vllm.utils.network_utils",
        ("get_ip()",),
        "reads",
        "p2p.connector",
        "The address at which a worker listens.",
    ),
    HostFact(
        f"{_CONNECTOR}.v1.base",
        ("KVConnectorMetadata", "KVConnectorWorkerMetadata"),
        "reads",
        "p2p.orders",
        "The classes of what travels between scheduler and workers.",
        since="0.32",
    ),
    HostFact(
        f"{_CONNECTOR}.v1.base:KVConnectorWorkerMetadata",
        ("aggregate(other)",),
        "overrides",
        "p2p.orders",
        "The answers of all workers become one.",
        since="0.32",
    ),
    HostFact(
        _REQUEST,
        ("request_id", "num_prompt_tokens", "prompt_token_ids", "skip_reading_prefix_cache"),
        "reads",
        "p2p.scheduling",
        "The prompt, and whether all of it must be computed.",
    ),
    HostFact(
        _REQUEST,
        ("prompt_token_ids", "lora_request", "cache_salt", "mm_features"),
        "reads",
        "p2p.route",
        "All that a prompt's keys and values depend on.",
    ),
    HostFact(
        f"{_OUTPUT}:SchedulerOutput",
        ("scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens"),
        "reads",
        "p2p.scheduling",
        "The requests of a step.",
    ),
    HostFact(
        f"{_OUTPUT}:NewRequestData",
        ("req_id", "block_ids", "num_computed_tokens"),
        "reads",
        "p2p.scheduling",
        "A new request's blocks.",
    ),
    HostFact(
        f"{_OUTPUT}:CachedRequestData",
        ("req_ids", "resumed_req_ids", "new_block_ids", "num_computed_tokens"),
        "reads",
        "p2p.scheduling",
        "A running request's new blocks, or all of them after a preemption.",
    ),
    HostFact(
        f"{_METRICS}:KVConnectorStats",
        ("reset()", "aggregate(other)", "reduce()", "is_empty()"),
        "overrides",
        "p2p.counts",
        "vLLM's log has a connector's numbers by these.",
    ),
    HostFact(
        f"{_METRICS}:KVConnectorStats", ("data",), "reads", "p2p.counts", "The numbers, as they go between processes."
    ),
    HostFact(
        f"{_METRICS}:KVConnectorPromMetrics",
        ("observe(transfer_stats_data, engine_idx=0)",),
        "overrides",
        "p2p.counts",
        "/metrics has a connector's numbers by it.",
    ),
    HostFact(
        f"{_METRICS}:KVConnectorPromMetrics",
        ("_counter_cls", "per_engine_labelvalues"),
        "reads",
        "p2p.counts",
        "The class of counters, and their labels.",
    ),
    HostFact(
        "vllm.config.parallel:ParallelConfig",
        ("nnodes",),
        "reads",
        "refusals",
        "Ranks on several machines have no common address.",
    ),
)
