"""Manifests of a plan for cluster managers, one file each, and their registry."""
