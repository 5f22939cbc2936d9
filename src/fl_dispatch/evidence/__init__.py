"""Measurements of implementations: results (verify), speed (bench), and an engine's accuracy (perplexity).

The first two use only the operator's declaration, so they serve operators and implementations that this package does
not know. The report shows all of them.
"""
