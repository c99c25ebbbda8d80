"""Transfer of KV cache contents between engines: layouts, tickets, backends and the mover.

The mover runs in the data mover process of a machine. Nothing here imports torch.
"""
