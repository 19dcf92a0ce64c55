"""HTTP/1.1 both ways: serving clients (`server`), and asking replicas (`client`).

An application framework and an HTTP client library cost ten times as much as the bytes that they carry. So the hot path
has its own small ones here. The code that parses and writes heads does no I/O, so tests need no sockets.
"""
