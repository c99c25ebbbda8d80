"""Models: config.json, weights, layers shared by families, and the registry of architectures.

families/ has one file per family.
"""
