"""An engine's end of the link to a router: announces the engine and runs its requests."""
