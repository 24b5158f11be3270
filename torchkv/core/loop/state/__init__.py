"""The state of the resident loop, as compiled code and Python read it."""
