"""A point-to-point KV connector: an engine that reads prompts sends their KV cache to one that writes the answers.

vLLM had ``P2pNcclConnector`` and removed it. This connector serves any chip, because keys and values can travel through
main memory, over ZMQ on TCP. If both engines have NCCL, links carry them from device to device, and ZMQ announces them.
Two engines only need each other's address, so engines can come and go.

From the top layer down:

==============  ========================================================================================================
``connector``   vLLM's interface; each method goes to ``scheduling`` or to ``working``
``working``     the connector in a worker: an exchange at the worker's own KV cache
``scheduling``  the connector in vLLM's scheduler: requests to await, load and send
``proxy/``      the HTTP server in front of engines, its list of engines, and its command
``orders``      messages of the scheduler's half to the workers' halves, and their answers
``engine/``     the sockets and threads between this engine's outbox and another's inbox
``links/``      wires from device to device, over NCCL, each with a thread of its own
``memory/``     memory for waiting caches, as a buddy system; blocks of all layers as bytes
``options``     settings of ``kv_connector_extra_config``
``counts``      traffic, counted for vLLM's log and ``/metrics``
``protocol/``   routes, messages, secrets and heartbeats between engines and the proxy
==============  ========================================================================================================
"""
