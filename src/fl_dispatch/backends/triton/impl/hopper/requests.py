"""A batch's requests: new tokens in one row, and keys that are paged or lie in a row, too."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .aggregates import aggregate


@aggregate
class Request:
    """First token, new tokens, keys, and first key (0 if they are paged) of a request, or of several."""

    begin: gl.tensor
    new: gl.tensor
    length: gl.tensor
    key_begin: gl.tensor


@gluon.jit
def load_request(query_starts, key_lengths, request, mask, PAGED: gl.constexpr):
    """Look requests up; all is 0 outside the mask. Unless ``PAGED``, ``key_lengths`` has where keys start."""
    begin = gl.load(query_starts + request, mask=mask, other=0).to(gl.int32)
    new = gl.load(query_starts + request + 1, mask=mask, other=0).to(gl.int32) - begin
    key_begin = begin * 0
    length = gl.load(key_lengths + request, mask=mask, other=0).to(gl.int32)
    if not PAGED:
        key_begin = length
        length = gl.load(key_lengths + request + 1, mask=mask, other=0).to(gl.int32) - key_begin
    return Request(begin, new, length, key_begin)
