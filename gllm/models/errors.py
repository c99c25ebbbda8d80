"""The error of a model that cannot be served; its message says why and what to do.

Owns the type alone, so that every part of loading can raise it without importing another.
"""


class ModelError(ValueError):
    """Raised for a model that is missing, broken or asks for arithmetic that is not implemented."""
