"""The user's command line, `radixfleet`. Starts other commands; holds no logic of a room."""

__version__ = "0.1.0"
