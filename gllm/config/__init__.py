"""Everything a user can set: engine, server and sampling options, and their command-line flags.

Fields declare defaults and ranges; flags.py derives the flags from them, field_types.py converts
values, limits.py holds the largest sizes of a request.
"""
