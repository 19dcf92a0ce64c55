"""What happened to a request and what is computed from it: TTFT, TPOT, E2E latency, hit rate; each defined once."""
