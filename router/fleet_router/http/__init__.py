"""HTTP/1.1 on the event loop: towards clients and towards workers."""
