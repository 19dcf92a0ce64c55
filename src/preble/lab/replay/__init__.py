"""Decision logs replayed: the same decisions again, or those that another policy would have taken."""
