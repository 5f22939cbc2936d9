"""A point-to-point KV connector: an engine that reads prompts hands their KV cache to one that writes the answers.

vLLM had ``P2pNcclConnector`` and dropped it; this one serves any chip, because keys and values can travel through main
memory, over ZMQ on TCP. They go from device to device by links if both engines have NCCL, and ZMQ tells of them.
Two engines need each other's address and nothing else, so engines come and go.

====================  ==================================================================================================
``options``           what a user may say in ``kv_connector_extra_config``
``route``             from where to where one prompt's cache goes, as the proxy wrote it into the request's id
``messages``          what engines and the proxy tell each other, bounded and checked
``secret``            sockets that talk only to those who share a secret
``pool``              memory for caches that wait, as a buddy system
``wires``             from one device to another: the interface, and which library makes them
``nccl``              wires over NCCL
``nccl_library``      NCCL's functions, and communicators that never wait for the other rank
``links``             a wire with the thread that uses it, and those that an engine has
``blocks``            blocks of all layers as bytes, and back
``remembered``        what became of the last transfers
``outbox``            the sending half's state: prompts that leave this engine
``inbox``             the receiving half's state: prompts that arrive
``engine``            the sockets and threads between an outbox here and an inbox there
``scheduling``        the connector in vLLM's scheduler: what is awaited, loaded and sent
``orders``            what the scheduler's half tells the workers' halves, and their answers
``working``           the connector in a worker: an engine at the worker's own KV cache
``counts``            what travelled: counted, in vLLM's log and in ``/metrics``
``connector``         vLLM's interface, each method passed on to one of these two
``heartbeat``         an engine tells the proxy that it is there
``instances``         the engines that a proxy has heard
``proxy``             the HTTP server in front: first an engine that reads, then one that writes
``facts``             names of vLLM's that all of this relies on
====================  ==================================================================================================
"""
