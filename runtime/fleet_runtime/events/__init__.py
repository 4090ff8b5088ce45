"""KV events: the stream that tells routers what this worker's prefix cache holds."""
