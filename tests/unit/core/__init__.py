"""Tests of torchkv.core."""
