"""Text <-> token ids, the same on both sides: the router's edge makes the ids, a runtime called without a router makes them too.

Needs `tokenizers` and `jinja2` only. Imports no room.
"""
