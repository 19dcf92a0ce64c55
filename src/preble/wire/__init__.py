"""HTTP/1.1 by callbacks: what placed requests and their streams run on, towards clients and towards replicas.

An application framework and an HTTP client library cost ten times as much as the bytes that they carry. So the hot path
has its own small ones here. What reads and writes bytes does no I/O and is tested without sockets.
"""
