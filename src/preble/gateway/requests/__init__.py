"""One client request: placed, relayed, answered."""
