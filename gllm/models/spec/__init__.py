"""A model as data: its layers, their arithmetic, and the names of their weights in a checkpoint.

A model family builds these specs from config.json. They need no torch, so that the frontend can
divide layers among stages and compute the size of the KV cache.

Tensor names are those of checkpoints, without `.weight` and `.bias`. Names within a layer are
relative to the layer.
"""
