"""Tools that measure what somebody claims about an implementation: right (verify), how fast (bench), and how exactly an
engine computes with it (perplexity). The report shows what they found.

The first two work from the operator's declaration alone, so they serve an operator or an implementation that this
package does not know.
"""
