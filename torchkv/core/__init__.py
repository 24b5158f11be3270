"""The resident loop: the part of a request's path that runs in compiled code, without the GIL."""
