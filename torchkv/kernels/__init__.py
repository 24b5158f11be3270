"""Triton kernels that copy and checksum pages, and what launches them."""
