"""Every place where a host attribute is replaced or added at run time, and every difference between host versions.

Nothing else in ``vllm_fl`` replaces vLLM's or PyTorch's attributes; ``host_facts.yaml`` has the reasons. A caller
imports the module that it needs:

===================  ===================================================================================================
``versions``         the host's version, which versions are tested, and the warning on others
``detection``        what vLLM is told and asked before it has a platform
``accelerator``      ``torch.accelerator`` without an accelerator
``kernels``          the Triton kernels that the V1 model runner launches, on a CPU
``model_runner``     which of vLLM's model runners a device without Triton gets
``device_memory``    vLLM's allocator for sleep mode, on a GPU that is not vLLM's own platform
``streams``          ``torch.cuda``'s streams, events and graphs on a device whose PyTorch module is another
``library``          what takes the place of vLLM's compiled library on a GPU
``attention_class``  what vLLM asks an attention class
``threads``          PyTorch's threads, which vLLM would set to one where a CPU's model computes on them
``generators``       seeded draws of prompts in chunks, where a device's generators count no numbers
``loaders``          an account of the tensors that vLLM's loaders hand to a model
``layer_classes``    linear layers, and layer classes that are no ``CustomOp``
``determinism``      vLLM's own kernels for batch invariance, on a CPU
``metrics``          the registry behind ``/metrics``
``ending``           streams that run when an engine's client ends
``models``           models that vLLM gets wrong, or runs by classes of Transformers
===================  ===================================================================================================
"""
