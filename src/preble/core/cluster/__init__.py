"""The replicas' state: requests in flight, load in the window."""
