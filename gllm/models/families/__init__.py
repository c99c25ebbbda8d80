"""Model families, related ones in one file; registry.py above lists their architectures."""
