"""Prefills of a real decoder in processes of their own, whose pages are sent at the end or layer by layer."""
