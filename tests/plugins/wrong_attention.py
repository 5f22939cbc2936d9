"""An attention class that a vendor could bring, wrong on purpose: it attends to nothing."""

from vllm_fl.attention.dense import AttentionFLBackend, AttentionFLImpl


class ForgetfulImpl(AttentionFLImpl):
    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, **scales):
        return output.zero_()


class ForgetfulBackend(AttentionFLBackend):
    @staticmethod
    def get_impl_cls():
        return ForgetfulImpl
