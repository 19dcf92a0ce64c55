"""Adapters for the programs that Preble calls (vLLM, any OpenAI-compatible server) and the emulator, which is one."""
