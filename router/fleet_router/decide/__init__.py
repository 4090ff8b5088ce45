"""What the router decides with: index, load, rule, queue. No clock, no I/O, no randomness of its own: all three are passed in."""
