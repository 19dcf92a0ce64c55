"""Serve HTTP: the listening socket, uvicorn, and connections with limits.

The gateway and the emulator use it; it knows neither.
"""
