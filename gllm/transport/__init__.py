"""Moves activations between stages, one file per transport; registry.py lists them."""
