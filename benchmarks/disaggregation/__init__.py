"""Benchmark of prefill and decode on different engines: its cost, and when a fetch pays."""
