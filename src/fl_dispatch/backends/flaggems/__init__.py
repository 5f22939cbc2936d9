"""FlagGems: hardware-neutral Triton kernels of the FlagOS project, as ``default.flagos``."""
