"""The local scheduler: one replica's queue, batches and prefix cache."""
