"""`triforce serve`: one engine behind an OpenAI-compatible interface and a page."""
