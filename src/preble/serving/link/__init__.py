"""The link between the scheduler process and others on its host: docs/reference/scheduler-protocol.md."""
