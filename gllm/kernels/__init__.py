"""Tensor operations, one per file: a torch reference and the dispatch to a faster kernel.

native/ has compiled kernels for CPUs, triton/ has kernels for GPUs.
"""
