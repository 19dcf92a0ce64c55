"""Preble's local scheduling inside engines, which call it through their plug-in points.

It runs in an engine's own environment, so it needs only the standard library and what `preble.core` needs.
"""
