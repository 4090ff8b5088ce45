"""Pure: one revision of a service as the objects that make it up. No cluster, no clock, no settings but those passed in."""
