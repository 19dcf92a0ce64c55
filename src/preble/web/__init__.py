"""How Preble serves HTTP, whoever serves: the listening socket, uvicorn set up, connections with bounds.

Used by the gateway and the emulator; knows neither.
"""
