"""Compiled kernels for CPUs, in C++: one build per instruction set, selected at run time."""
