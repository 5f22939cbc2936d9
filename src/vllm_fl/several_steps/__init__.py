"""Several steps of the model per scheduler call (``VLLM_FL_STEPS``), by vLLM's V2 model runner.

vLLM's scheduler reserves room for drafts, one token each, and takes back unused room. Here the drafts are placeholders:
the runner makes a step of one token, samples as vLLM does, and makes the next step, without the host. Each step runs
the same kernels, graphs and sampler as a separate scheduler call, so the tokens are the same.

=============  =========================================================================================================
``choice``     whether an engine makes several steps, and why not
``scheduler``  how many steps a scheduler call makes
``runner``     the steps
=============  =========================================================================================================
"""
