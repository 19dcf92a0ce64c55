"""What an emulated model reads and says: bodies, token ids, and answers in the form of each endpoint."""
