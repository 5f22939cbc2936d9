"""Data between engines, and from a trainer into an engine: features of vLLM that dispatch no operator.

``p2p`` is a KV connector between engines, and ``weights`` has backends of vLLM's weight transfer. ``extension`` offers
both, and lists the names that they rely on in vLLM (entry point group ``vllm_fl.extension``). This package imports no
plugin and chooses no operator; it uses the core's errors, logs and devices.
"""
