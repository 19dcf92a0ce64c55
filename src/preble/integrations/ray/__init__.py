"""Preble inside Ray Serve: a request router for any application, and a scheduler that Serve's HAProxy asks.

It runs in Ray's processes, so Preble must be installed in their environment (the extra `ray`). See
docs/howto/ray-serve.md.
"""
