"""Rotary tables and sliding windows as Transformers computes them, beside a host's."""
