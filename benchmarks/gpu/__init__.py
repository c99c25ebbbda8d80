"""Benchmark of gllm on a GPU: correctness and speed of kernels, engine and stages."""
