"""Every place where a host attribute is replaced or added at run time, and every difference between host versions.

Nothing else in ``vllm_fl`` replaces vLLM's or PyTorch's attributes. A caller imports the module that it needs:

===================  ===================================================================================================
``replacements``     the table of what is replaced, with reasons, and the check that every target is still there
``versions``         the host's version, which versions are tested, and the warning on others
``detection``        what vLLM is told and asked before it has a platform
``accelerator``      ``torch.accelerator`` without an accelerator
``kernels``          the Triton kernels that the V1 model runner launches, on a CPU
``library``          what takes the place of vLLM's compiled library on a GPU
``latent``           latent attention of vLLM 0.26
``runner``           a worker's workspace and model runner
``attention_class``  what vLLM asks an attention class
``layer_classes``    linear layers, and layer classes that are no ``CustomOp``
``models``           models that vLLM gets wrong
===================  ===================================================================================================
"""
