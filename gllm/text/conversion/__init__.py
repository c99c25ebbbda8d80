"""Conversion of tokenizers that models publish in other files than tokenizer.json."""
