"""What clients ask for: paths, dialects, bodies and event streams. Used by the edge and by engines."""
