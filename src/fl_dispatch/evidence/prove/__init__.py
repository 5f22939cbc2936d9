"""Proof of untrusted candidates: a separate process computes, and this process makes inputs and compares."""
