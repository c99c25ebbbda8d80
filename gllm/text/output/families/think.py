"""Reasoning between `<think>` and `</think>`, as many families write it."""

from gllm.text.output.reasoning import ReasoningTags

REASONING = ReasoningTags("think", "<think>", "</think>")
