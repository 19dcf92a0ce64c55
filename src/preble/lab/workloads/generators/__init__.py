"""Workloads of made-up tokens with measured statistics. See docs/reference/workloads.md."""
