"""Tables of models, devices and links that names on the command line stand for. No times."""
