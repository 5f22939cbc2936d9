"""Proof of untrusted candidates: a process of its own computes, and this process makes inputs and compares."""
