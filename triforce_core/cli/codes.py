"""Exit codes that no error carries. Those of signals are 128 and their number."""

OUTPUT_FAILED = 5
INTERRUPTED = 130
READER_GONE = 141
