"""Requests on the resident loop: handing them over, taking them back, and acting on what the loop tells."""
