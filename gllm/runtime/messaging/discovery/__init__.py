"""Discovery of the peers to dial, one file per kind; registry.py has their table."""
