"""Several steps of the model for one scheduling (``VLLM_FL_STEPS``), by vLLM's V2 model runner.

vLLM's scheduler gives a request room for drafts, one token each, and takes back what was not used. Here the drafts are
placeholders: the runner makes a step of one token, samples as vLLM does, and makes the next step, without the host.
A step runs the kernels, the graphs and the sampler of a scheduling of its own, so the tokens are the same.

=============  =========================================================================================================
``choice``     whether an engine makes several steps, and why not
``scheduler``  how many steps a scheduling makes
``runner``     the steps
=============  =========================================================================================================
"""
