"""The asking side: connections to replicas, and the answers that come over them."""
