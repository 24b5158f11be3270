"""The resident loop itself, compiled, and all of its state. Callers in Python go through `torchkv.core.core`."""
