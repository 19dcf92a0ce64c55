"""What operators and clients read of the gateway itself: health, models, metrics, replicas, decisions, live page."""
