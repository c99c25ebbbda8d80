"""Fields of request bodies: their types, ranges and conversion, one file per subject."""
