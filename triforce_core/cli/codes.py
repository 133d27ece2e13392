"""Exit codes that no error class carries. The code of a signal is 128 plus its number."""

OUTPUT_FAILED = 5
INTERRUPTED = 130
READER_GONE = 141
