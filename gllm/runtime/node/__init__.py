"""The agent of another machine: starts and ends the workers that the head places there."""
