"""Data mover of a machine: moves activations between rings of its workers and other machines.

`python -m gllm.transport.link` runs as a child of the head or of an agent. It imports no torch.
"""
