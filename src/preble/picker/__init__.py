"""The endpoint picker: Envoy's external processing (gRPC) as the Gateway API Inference Extension uses it.

A gateway asks here which endpoint a request goes to, and passes the request and its answer through.
"""
