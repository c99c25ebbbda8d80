"""Chat requests: messages, templates, tools, and what they require of the output.

The HTTP frontend and `LLM.chat` share this package; `gllm.engine.chat` puts its parts together.
"""
