"""How each kind of worker is spoken to; `kinds.engine_of` gives the kind of a worker."""
