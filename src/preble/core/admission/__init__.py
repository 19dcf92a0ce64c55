"""When a request may go to the fleet: a queue that is fair between tenants, and a gate that keeps the rest of it short.

Time comes in as an argument, in seconds; costs are in seconds of GPU time.
"""
