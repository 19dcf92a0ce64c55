"""Open-loop load generation and its reports."""
