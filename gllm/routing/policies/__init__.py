"""Routing policies, one per file: which engine gets a request."""
