"""ATen replacement: FlagGems' kernels in the place of PyTorch's own operators, in one process.

:mod:`.decision` says whether, :mod:`.names` which operators, :mod:`.check` whether a kernel is right, :mod:`.guard`
what stands in PyTorch's dispatcher, and :mod:`.replacement` puts all in place. Only the last imports FlagGems.
"""
