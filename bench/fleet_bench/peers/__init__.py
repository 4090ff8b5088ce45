"""`make bench-runtime`: our runtime beside others on the same machine in the same run; see docs/performance.md."""
