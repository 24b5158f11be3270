"""``python -m benchmarks``: benchmarks of the project itself, which run from a checkout only."""
