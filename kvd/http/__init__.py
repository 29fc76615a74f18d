"""The daemon over HTTP, for Prometheus and browsers: a process of its own that reads its page."""
