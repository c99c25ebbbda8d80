"""The error for a model that cannot be served.

A module of its own, so that every part of loading can raise it without importing another.
"""


class ModelError(ValueError):
    """Model that is missing, invalid or not implemented; the message names cause and remedy."""
