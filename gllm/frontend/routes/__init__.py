"""HTTP endpoints, one file per API; registry.py has their table."""
