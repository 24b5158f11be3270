"""Sending the pages of each layer while later layers are computed."""
