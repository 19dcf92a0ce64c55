"""Decisions kept and looked at: the log of everything that goes through the scheduler's door, replay, explanation."""
