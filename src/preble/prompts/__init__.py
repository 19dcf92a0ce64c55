"""Prompts: the bodies of requests and answers at each endpoint, and the token ids of texts, chats and media."""
