"""The deciding half: workers, their load and prefixes, choice, queue, other routers."""
