"""Policies of other serving systems, as Vidur (arXiv 2405.05465) models them for comparisons."""
