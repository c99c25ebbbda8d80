"""Link policies, one file each; policy_registry.py above has their table."""
