"""Huawei Ascend NPUs, through the public operators of ``torch_npu``."""
