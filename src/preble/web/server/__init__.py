"""The serving side: the listening socket, uvicorn, connections with limits, answers by callbacks."""
