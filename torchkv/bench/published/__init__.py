"""``python -m torchkv.bench published``: results that others have published about moving KV caches, measured here."""
