"""The serving side: the listening socket, connections with limits, answers by callbacks or by a task."""
