"""Traces and workloads: what is asked, when, and how much of it is shared."""
