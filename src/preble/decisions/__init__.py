"""Decisions: the log of every call of the scheduler, its replay, and the explanation of one decision."""
