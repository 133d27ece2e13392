"""Limits of kernels, for plans. There are no tensors here."""

# Largest number of parts into which the attention of a pass divides its keys on a GPU.
MOST_SPLITS = 32
# With more rows of a KV head than this, a GPU's attention to a cache does not divide the keys among
# programs, if rows are to have the same bits.
WHOLE_ROWS = 256
# On a CPU, heads times the parts into which the keys of each are divided, if there are fewer heads.
HOST_PARTS = 16
# A product with more rows than this decodes the weight first, some rows of it at a time. A program
# multiplies at most this many rows at a time, so more rows would decode the weight again.
FEW_ROWS = 64
# Bytes of the sums of the parts of a product, if its depth is divided among a GPU's programs: 1,024
# programs, each with 64 rows and columns in float32.
PARTS_BYTES = 1024 * 64 * 64 * 4
# Rows of a tile of a product of few rows with experts, each of which has tiles of its own.
EXPERT_TILE = 16
# Rows that a GPU's program multiplies by a split bfloat16 matrix at a time, at most. Each warp of a
# larger tile would decode the same numbers again, on GPUs before and after compute capability 9.0.
SPLIT_TILE = 32
# Numbers of a weight in blocks that are decoded at a time, so that no matrix exists in float32 as a
# whole.
DECODED_AT_ONCE = 2 << 20
# On a GPU, the most numbers that are quantised at a time, by some 300 launches of kernels, and
# device bytes for each meanwhile. A processor, or a GPU with little room, takes as many as above.
QUANTISED_AT_ONCE_ON_GPU, QUANTISE_BYTES = 8 << 20, 20
# Device bytes for each of these numbers while they are decoded, the result in float32 included.
DECODE_BYTES = 24
# Bytes of the numbers that a GPU's kernel decodes at a time, without temporaries. Products with
# fewer rows of a matrix would leave most of a GPU without work.
DECODED_BYTES_ON_GPU = DECODED_AT_ONCE * DECODE_BYTES
# The same where a processor's compiled kernel decodes: the numbers in float32. Another dtype takes
# its bytes besides.
DECODE_BYTES_ON_HOST = 4
# Both limits for weights in groups of 4 bits: numbers decoded at a time, and bytes for each.
GROUPS_AT_ONCE = 1 << 20
GROUPS_BYTES = 12
# Device bytes for each number of a dense half-precision weight whose products are made in float32.
WIDENED_BYTES = 4
# Device bytes for each split number while it is decoded, the result included.
SPLIT_BYTES = 12
# With a GPU kernel: numbers of a split matrix that are decoded at a time, and device bytes for
# each. With fewer numbers at a time a prefill would launch hundreds of thousands of kernels.
SPLIT_AT_ONCE_ON_GPU = 64 << 20
SPLIT_BYTES_ON_GPU = 2
# A split bfloat16 matrix has room for one exception per this many numbers, and for LEAST_EXCEPTIONS
# more.
NUMBERS_OF_AN_EXCEPTION = 704
LEAST_EXCEPTIONS = 32
# Bytes in which a split FP8 matrix has room for the low bits of a number, as a fraction: 2.9 bits.
# Normal numbers have 2.1, those of a Laplace distribution 2.8 (tests/kernels/test_split_fp8.py).
# With this room, a split matrix takes no more than a stored one.
LOW_BYTES_OF_FP8 = (23, 64)
# Numbers of a matrix in split blocks that are joined at a time, so that the result stays in a
# cache, and device bytes for each meanwhile: the result, and without a kernel temporaries
# (tests/core/test_memory.py).
JOINED_AT_ONCE_ON_GPU, JOINED_AT_ONCE = 16 << 20, 1 << 18
JOIN_BYTES_BY_KERNEL, JOIN_BYTES = 2, 64
# Places of exceptions are 32-bit integers, of which the greatest stands for none.
MOST_SPLIT_NUMBERS = 2**31 - 2
# A split matrix stores where the exceptions of each group of this many rows begin.
ROWS_OF_A_START = 32
# Adjacent split KV blocks are decoded this many at a time, by one launch.
KV_BLOCKS_AT_ONCE = 4
# Numbers of keys and values that are encoded or decoded at a time without a kernel, but at least
# one head: the temporaries stay in a processor's cache. Then the bytes for each number.
KV_CODED_AT_ONCE = 1 << 17
KV_CODING_BYTES = 14
# Least number of rows of a prefill that attend at once through a window; rows that attend at once
# see the keys of each other's windows too.
WINDOW_ROWS = 256
# Keys of a text are attended to in groups of this many, counted from its first key. A piece of keys
# that begins elsewhere gives other sums.
ALIGNED_KEYS = 64
# Numbers of rows of a prefill, and of keys, whose scores are capped at once. The latter is a
# multiple of ALIGNED_KEYS.
CAPPED_ROWS, CAPPED_KEYS = 64, 512
# Bytes of scores and masks of the rows of a prompt that choose their keys at once.
SELECTION_BYTES = 64 << 20
# Rows of the table of per-layer embeddings that are looked up at a time.
LOOKED_UP_AT_ONCE = 256
# Number of rows of a prefill that a recurrence computes at once, a multiple of the rows that are
# folded at a time.
DELTA_ROWS = 256


def selection_bytes(tokens: int, blocks: int, heads: int, itemsize: int) -> int:
    """Return the bytes for a row of a prompt of `tokens` tokens in `blocks` blocks that chooses its
    keys by `heads` queries: the maximum of three steps. The first has products and scores of blocks
    in float32, the second what compares scores, and the third which tokens the row sees, as bool
    and as what is added to scores, of `itemsize` bytes.
    """
    return max(blocks * max(heads * 4 + 4, 24), tokens * (2 + itemsize) + blocks * 6)


def rows_in_tiles(active: int, count: int, most: int = FEW_ROWS) -> int:
    """Return how many rows, each of which chooses `active` of `count` experts, a GPU multiplies by
    all experts at once, at most. If an expert has more rows than two tiles, decoding it for each
    takes longer than launching the products of each expert.

    most: rows of a tile, at most
    """
    return max(FEW_ROWS, 2 * most * count // active)


def most_tile_rows(itemsize: int, *, split: bool) -> int:
    """Return how many rows a GPU's program multiplies by an expert at a time, at most.

    itemsize: bytes of a number of the rows
    split: whether the experts are split bfloat16
    """
    if itemsize == 4:
        return EXPERT_TILE
    return SPLIT_TILE if split else FEW_ROWS


def expert_tile(each: int) -> int:
    """Return how many rows a tile of a product of many rows with experts has, if an expert has
    `each` rows on average: a power of 2 that is no less, if a program multiplies as many. A tile
    decodes its expert again, and half of an expert's last one has no rows.
    """
    return min(FEW_ROWS, max(EXPERT_TILE, 1 << (each - 1).bit_length()))


def most_expert_tiles(rows: int, active: int, count: int, tile: int = EXPERT_TILE) -> int:
    """Return an upper bound of the number of tiles of `rows` rows, each of which chooses `active`
    of `count` experts. tile: rows of a tile
    """
    return min(rows * active, count) + rows * active // tile
