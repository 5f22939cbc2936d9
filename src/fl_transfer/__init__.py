"""Data between engines, and from a trainer into an engine: features of vLLM that dispatch no operator.

``p2p`` is a KV connector between engines, and ``weights`` has backends of vLLM's weight transfer. ``facts`` lists the
names of vLLM that both rely on, and ``extension`` offers both (entry point group ``vllm_fl.extension``).
Nothing here imports a plugin or chooses an operator: the core gives errors, logs and devices.
"""
