"""File formats of models, and formats of the quantized weights in them."""
