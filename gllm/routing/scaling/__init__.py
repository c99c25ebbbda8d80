"""Number and roles of engines, and shifts of the workload; all of it is pure."""
