"""Workloads made of made-up tokens by measured statistics: one module each. See docs/reference/workloads.md."""
