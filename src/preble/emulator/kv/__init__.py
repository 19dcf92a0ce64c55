"""KV of an emulated replica: what it reports, keeps elsewhere, and gets from others."""
