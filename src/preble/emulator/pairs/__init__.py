"""Emulated replicas of fixed roles: one computes a prompt, another one decodes its answer."""
