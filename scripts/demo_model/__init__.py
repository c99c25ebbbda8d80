"""Corpus, training and evaluation of the demo model."""
