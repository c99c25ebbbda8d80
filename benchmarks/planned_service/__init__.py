"""Benchmark of a planned service: figures that `gllm plan search` expects against measured ones."""
