"""Data between engines, and from a trainer into an engine: features of vLLM that dispatch no operator.

``p2p`` is a KV connector between engines, and ``weights`` has backends of vLLM's weight transfer. ``extension``
offers both, and names what they rely on in vLLM (entry point group ``vllm_fl.extension``).
Nothing here imports a plugin or chooses an operator: the core gives errors, logs and devices.
"""
