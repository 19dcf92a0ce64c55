"""Messages between the gateways of one cluster: which requests each has placed, their first tokens and their ends.

Does no I/O: the simulator and the gateway carry the same messages, each in its own way.
"""
