"""Tools that measure what somebody claims about an implementation: right (verify), and how fast (bench).

Both work from the operator's declaration alone, so they serve an operator or an implementation that this package does
not know.
"""
