"""Benchmarks of gllm and the scripts that generate docs/benchmarks."""
