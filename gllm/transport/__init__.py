"""Transports of activations between stages, one file each; registry.py lists them."""
