"""Model families, one file each; registry.py above lists their architectures."""
