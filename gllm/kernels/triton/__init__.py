"""Triton kernels for GPUs, one file per operation; tuned/ has their tile sizes."""
