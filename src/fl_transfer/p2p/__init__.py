"""A point-to-point KV connector: an engine that reads prompts hands their KV cache to one that writes the answers.

vLLM had ``P2pNcclConnector`` and dropped it; this one serves any chip, because keys and values can travel through main
memory, over ZMQ on TCP. They go from device to device by links if both engines have NCCL, and ZMQ tells of them.
Two engines need each other's address and nothing else, so engines come and go.

From the top layer down:

==============  ========================================================================================================
``connector``   vLLM's interface; each method goes to ``scheduling`` or to ``working``
``working``     the connector in a worker: an exchange at the worker's own KV cache
``scheduling``  the connector in vLLM's scheduler: what is awaited, loaded and sent
``proxy/``      the HTTP server in front of engines, the engines that it has heard, and the command that starts it
``orders``      messages of the scheduler's half to the workers' halves, and their answers
``engine/``     the sockets and threads between an outbox here and an inbox there
``links/``      wires from device to device, over NCCL, and the thread that uses each
``memory/``     memory for caches that wait, as a buddy system; blocks of all layers as bytes
``options``     settings of ``kv_connector_extra_config``
``counts``      traffic, counted for vLLM's log and ``/metrics``
``protocol/``   routes, messages, secrets and heartbeats between engines and the proxy
==============  ========================================================================================================
"""
