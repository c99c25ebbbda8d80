"""Tests of gllm/fleet."""
