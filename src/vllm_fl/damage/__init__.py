"""Damaged requests under vLLM (``VLLM_FL_DAMAGED_REQUESTS``): they alone end, or are computed again.

vLLM can count NaN in each request's logits, and its counts come back with the sampled tokens. Here they count infinity
too, and the scheduler acts on them. A request with any is preempted, and its blocks leave the prefix cache. It is
computed again in an eager step, and each call of it is looked at: this shows the operator and layer where the numbers
began. All ranks do so together, because the step itself says it.

A KV connector may have sent the blocks to another engine meanwhile. By its method ``fl_take_back(requests, why)`` that
engine learns of it, and ``fl_spoiled(connector_output)`` names blocks here with what another one took back.

=============  =========================================================================================================
``choice``     whether an engine does so
``detection``  the count of each request's damaged logits
``scheduler``  the end or the new beginning of damaged requests
``messages``   words between scheduler and workers beside vLLM's own fields
``answers``    the error for a client
=============  =========================================================================================================
"""
