"""Endpoints, one file per API: completions, chat, responses, messages, embeddings, operations."""
