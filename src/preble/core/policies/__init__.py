"""Placement policies: the protocol, what a policy sees, and every rule."""
