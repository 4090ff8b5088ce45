"""Reads the workers' KV events into the brain's index: `follow` decides per stream, `apply` writes, `reader` owns the sockets."""
