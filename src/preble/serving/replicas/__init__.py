"""Replicas as the serving room watches them: health, model, KV event streams."""
