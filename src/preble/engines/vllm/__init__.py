"""vLLM replicas: the client of one, what it says of itself, and splits over two."""
