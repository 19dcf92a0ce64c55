"""The global scheduler: places requests, follows them, and keeps the index true."""
