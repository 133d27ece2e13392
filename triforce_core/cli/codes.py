"""Exit codes that no error carries."""

INTERRUPTED = 130
