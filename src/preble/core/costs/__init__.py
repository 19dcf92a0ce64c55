"""From tokens to seconds: the cost profile, the cost model, and its correction while serving."""
