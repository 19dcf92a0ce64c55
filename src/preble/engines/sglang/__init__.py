"""SGLang replicas: the client of one, its bodies and published load, and pairs of two with fixed roles."""
