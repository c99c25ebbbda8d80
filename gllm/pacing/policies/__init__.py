"""Link policies, one file each; ../policy_registry.py has their table."""
