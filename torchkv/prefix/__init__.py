"""Prefix caching: which prefixes of prompts a receiver holds already, so that only the rest is sent."""
