"""Preble inside other programs: its local scheduling in engines, through their plug-in points, and its router in Ray.

What runs in an engine's environment needs only the standard library and what `preble.core` needs.
"""
