"""HTTP towards clients: one connected client, its body, its key, and errors in OpenAI's form."""
