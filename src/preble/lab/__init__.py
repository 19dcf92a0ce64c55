"""The laboratory: workloads, the simulator, comparisons, load generation, cost profiles, replays of decision logs.

Whoever serves needs nothing of it: only the commands of the laboratory and the public names import this room.
"""
