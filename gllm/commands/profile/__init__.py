"""Times of parts of a model on this machine's device, measured without an engine."""
