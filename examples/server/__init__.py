"""A small disaggregated server: an OpenAI-compatible router, and workers that come and go. See docs/server.md."""
