"""Engines of prefill and of decode with the highest goodput per GPU."""
