"""Bytes: where weights and KV live, and how they cross the link. Knows no vocabulary."""
