"""Packed weights in files that all processes of a machine map: format of a file, and the folder."""
