"""Several processes: front ends that share the port, one scheduler process, and the first, which starts them all."""
