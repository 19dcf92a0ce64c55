"""The schedulers: pure, without I/O, clock, logging, threads or a global random generator."""
