"""Rules of serving as plain objects: time is an argument, nothing here waits, reads or sends."""
