"""Replacements of and additions to a host's attributes at run time, and differences between host versions.

Nothing else in ``vllm_fl`` replaces vLLM's or PyTorch's attributes; ``host_facts.yaml`` has the reasons. A caller
imports the module that it needs:

===================  ===================================================================================================
``versions``         the host's version, and which versions are tested
``detection``        settings of vLLM, and questions to it, before it has a platform
``accelerator``      ``torch.accelerator`` without an accelerator
``kernels``          the V1 model runner's Triton kernels, on a CPU
``model_runner``     the choice among vLLM's model runners on a device without Triton
``device_memory``    vLLM's allocator for sleep mode, on a GPU without vLLM's own platform
``streams``          ``torch.cuda``'s streams, events and graphs on a device with another PyTorch module
``library``          replacements of vLLM's compiled library on a GPU
``threads``          PyTorch's threads; vLLM would set them to one though a CPU's model computes on them
``generators``       seeded draws of prompts in chunks, where a device's generators count no numbers
``loaders``          an account of the tensors from vLLM's loaders to a model
``layer_classes``    linear layers, and layer classes other than ``CustomOp``
``indexer``          the indexer of sparse latent attention
``determinism``      vLLM's own kernels for batch invariance, on a CPU
``metrics``          the registry behind ``/metrics``
``ending``           running streams at the end of an engine's client
``models``           models that vLLM gets wrong, runs by Transformers, or gives an indexer
``arrivals``         requests on their way while an engine's thread makes steps
``whole_graphs``     models compiled as one graph, from vLLM's cache
``state_drafts``     batches with drafts, for layers with a state
===================  ===================================================================================================
"""
