"""Operations on tensors, one per file: reference in torch and dispatch to a faster kernel.

native/ has compiled kernels for CPUs, triton/ those for GPUs.
"""
