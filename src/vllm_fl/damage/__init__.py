"""Damaged requests under vLLM (``VLLM_FL_DAMAGED_REQUESTS``): only these end, or are computed again.

vLLM can count NaN in each request's logits, and returns the counts with the sampled tokens. Here the counts include
infinity, and the scheduler acts on them. A damaged request is preempted, and its blocks leave the prefix cache. It is
computed again in an eager step with each call checked, which shows the operator and layer where the damage began. All
ranks do so together, because the step carries the mark.

A KV connector may have sent the blocks to another engine meanwhile. Its method ``fl_take_back(requests, why)`` informs
that engine, and ``fl_spoiled(connector_output)`` names local blocks with data that another engine took back.

=============  =========================================================================================================
``choice``     whether an engine does so
``detection``  the count of each request's damaged logits
``scheduler``  the end or the new beginning of damaged requests
``messages``   messages between scheduler and workers beside vLLM's own fields
``answers``    the error for a client
=============  =========================================================================================================
"""
