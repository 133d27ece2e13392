"""What kernels take at most, for plans: no tensors here."""

MOST_SPLITS = 32
"""Parts into which the attention of a pass divides its keys on a GPU."""
