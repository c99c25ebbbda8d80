"""Comparison of gllm with other engines on CPUs, and measurements of its parts."""
