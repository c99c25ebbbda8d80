"""Processes that gllm starts on a machine: their output, their readiness and their end."""
