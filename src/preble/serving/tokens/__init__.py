"""From texts and chats to token ids."""
