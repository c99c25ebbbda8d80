"""Pacing of weak links: which bytes a link carries next, without I/O, torch or a clock."""
