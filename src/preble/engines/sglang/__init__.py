"""The client of an SGLang replica."""
