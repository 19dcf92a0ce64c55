"""The service: HTTP in front, the scheduler inside, replicas behind."""
