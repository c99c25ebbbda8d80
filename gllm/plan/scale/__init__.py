"""Planner of the number of engines by rate: worker type, placement, fleet sizes (Aladdin)."""
