"""Environments that the tests and the demo need beside Preble's own: real engines, and servers of other projects.

Standard library only: they are made before anything is installed.
"""
