"""Checks of `gllm doctor`: what keeps machines from forming one engine, and what mends it."""
