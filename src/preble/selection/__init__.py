"""The selection service: placement over HTTP for programs that carry the bytes themselves.

Paths and fields are those of NVIDIA Dynamo's standalone selection service where they mean the same.
"""
