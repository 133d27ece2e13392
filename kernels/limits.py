"""What kernels take at most, for plans: no tensors here."""

# The attention of a pass divides its keys into so many parts on a GPU, at most.
MOST_SPLITS = 32
# A product with more rows than this decodes weights first, some rows at a time: so many rows a
# program multiplies at a time at most, and more would have it decode the weights again.
FEW_ROWS = 64
# Numbers of a weight in blocks that are decoded at a time: no matrix exists in float32 as a whole.
DECODED_AT_ONCE = 2 << 20
# Device bytes for each of them while they are decoded, the result in float32 included.
DECODE_BYTES = 24
# The same of weights in groups of 4 bits.
GROUPS_AT_ONCE = 1 << 20
GROUPS_BYTES = 12
# And of dense ones in half precision whose products are made in float32.
WIDENED_BYTES = 4
# Device bytes for each split number while they are decoded, the result included.
SPLIT_BYTES = 12
# On a GPU with a kernel for it: numbers of a matrix split that are decoded at a time, and
# device bytes for each. With fewer at a time a prompt would launch hundreds of thousands of
# kernels.
SPLIT_AT_ONCE_ON_GPU = 64 << 20
SPLIT_BYTES_ON_GPU = 2
# SplitBF16 have room for one exception of so many numbers, and for some more.
NUMBERS_OF_AN_EXCEPTION = 704
LEAST_EXCEPTIONS = 32
# Of a matrix split it is known where the exceptions of so many rows begin.
ROWS_OF_A_START = 32
# Blocks of KV split that lie side by side are decoded so many at a time, by two launches.
KV_BLOCKS_AT_ONCE = 4
# Numbers of keys and values that are coded or decoded at a time without a kernel, of one head at
# the least: what that takes stays in a processor's cache. Bytes for each.
KV_CODED_AT_ONCE = 1 << 17
KV_CODING_BYTES = 14
