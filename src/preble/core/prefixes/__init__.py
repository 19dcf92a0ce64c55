"""Which prompts begin alike, which replica holds how much of them, and what an eviction would cost."""
