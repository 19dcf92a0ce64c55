"""The client of a vLLM replica."""
