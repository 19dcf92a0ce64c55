"""Engines on this machine: started, waited for, and stopped."""
