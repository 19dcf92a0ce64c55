"""Code that others call: Preble's local scheduling inside engines, through their plug-in points.

Runs in an engine's own environment and so needs nothing but the standard library and what `preble.core` needs.
"""
