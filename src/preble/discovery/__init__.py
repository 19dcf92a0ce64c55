"""Which replicas are wanted, as DNS or Kubernetes says. Each source yields its set of members whenever that changes."""

from preble.discovery.member import Member
from preble.discovery.source import Source, make_source

__all__ = ["Member", "Source", "make_source"]
