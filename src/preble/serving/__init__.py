"""From requests to placements, and each placement's life; knows replicas, speaks no HTTP towards clients."""
