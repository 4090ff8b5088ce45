"""The HTTP half: reads requests, asks the desk for a lease, sends, streams, answers."""
