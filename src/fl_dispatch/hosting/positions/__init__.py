"""Rotary tables and sliding windows computed as in Transformers, to compare with a host's."""
