"""KV events of a replica: from its socket to what the scheduler hears of its cache."""
