"""Tests of gllm/router."""
