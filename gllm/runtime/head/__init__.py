"""The head of an engine: supervises its processes, places its stages, keeps its requests."""
