"""Metrics and log events of placements, replicas and the scheduler."""
