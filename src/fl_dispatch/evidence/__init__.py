"""Tools that measure an implementation: its results (verify), its speed (bench), and an engine's accuracy with it
(perplexity). The report shows what they found.

The first two work from the operator's declaration alone, so they serve an operator or an implementation that this
package does not know.
"""
