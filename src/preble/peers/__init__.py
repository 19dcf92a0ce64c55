"""What the gateways of one cluster tell each other: which requests they have placed, and how those go on.

Sans I/O: the simulator and the gateway carry the same messages, each in its own way.
"""
