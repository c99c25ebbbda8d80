"""Options: how a record of options becomes flags, keys of a file and fields of a request."""
