"""Models: config.json, weights, layers shared by families, and the registry of architectures.

families/ has the model families, related ones in one file.
"""
