"""Emulated devices: what `--device emulated` takes from the simulator. Imports no torch."""
