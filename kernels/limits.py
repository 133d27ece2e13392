"""What kernels take at most, for plans: no tensors here."""

# The attention of a pass divides its keys into so many parts on a GPU, at most.
MOST_SPLITS = 32
