"""What kernels take at most, for plans: no tensors here."""

# The attention of a pass divides its keys into so many parts on a GPU, at most.
MOST_SPLITS = 32
# Numbers of a weight in blocks that are decoded at a time: no matrix exists in float32 as a whole.
DECODED_AT_ONCE = 2 << 20
# Device bytes for each of them while they are decoded, the result in float32 included.
DECODE_BYTES = 24
