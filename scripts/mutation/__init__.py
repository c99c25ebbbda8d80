"""Faults seeded into gllm, and the tests that find them: docs/mutants.md."""
