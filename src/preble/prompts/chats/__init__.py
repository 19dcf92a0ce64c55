"""What engines make of bodies in other forms than OpenAI's chats, before they render them."""
