"""Resident loops that are broken on purpose, which the simulation must catch: see `broken_loops`."""
