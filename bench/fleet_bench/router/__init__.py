"""`make bench-router`: our router beside others on the same machine in the same run; see docs/performance.md."""
