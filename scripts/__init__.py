"""Tools of the project, run as `python -m scripts.NAME`: generated pages, checks, demo model."""
