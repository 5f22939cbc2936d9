"""A batch's requests: contiguous new tokens, and keys that are paged or also contiguous."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .aggregates import aggregate


@aggregate
class Request:
    """First token, new tokens, keys, and first key (0 for paged keys) of a request, or of several."""

    begin: gl.tensor
    new: gl.tensor
    length: gl.tensor
    key_begin: gl.tensor


@gluon.jit
def load_request(query_starts, key_lengths, request, mask, PAGED: gl.constexpr):
    """Load requests; their fields are 0 outside the mask. Unless ``PAGED``, ``key_lengths`` has the starts of keys."""
    begin = gl.load(query_starts + request, mask=mask, other=0).to(gl.int32)
    new = gl.load(query_starts + request + 1, mask=mask, other=0).to(gl.int32) - begin
    key_begin = begin * 0
    length = gl.load(key_lengths + request, mask=mask, other=0).to(gl.int32)
    if not PAGED:
        key_begin = length
        length = gl.load(key_lengths + request + 1, mask=mask, other=0).to(gl.int32) - key_begin
    return Request(begin, new, length, key_begin)


@gluon.jit
def load_token(covered, counts, token):
    """Describe a token as a request with its listed keys; reads nothing for a token that no request covers."""
    inside = token < gl.load(covered)
    length = gl.load(counts + token, mask=inside, other=0).to(gl.int32)
    return Request(token, inside.to(gl.int32), length, length * 0)
