"""Block types: how many numbers a block has, and in how many bytes. No tensors.

The gguf package has the same table for GGUF's types, but is loaded only for such files; a test
compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BlockType:
    """A format of blocks: numbers of a few bits that share scales.

    name, number: as in ggml; number is 0 for a type that ggml does not have
    elements, nbytes: numbers and bytes of a block
    """

    name: str
    number: int
    elements: int
    nbytes: int

    def row_bytes(self, columns: int) -> int:
        """Return the bytes of a row of `columns` columns. Raises ValueError for a partial block."""
        if columns % self.elements:
            raise ValueError(f"{columns} columns are not whole {self.name} blocks")
        return columns // self.elements * self.nbytes


BLOCK_TYPES = {
    kind.name: kind
    for kind in (
        BlockType("Q4_0", 2, 32, 18),
        BlockType("Q4_1", 3, 32, 20),
        BlockType("Q5_0", 6, 32, 22),
        BlockType("Q5_1", 7, 32, 24),
        BlockType("Q8_0", 8, 32, 34),
        BlockType("Q2_K", 10, 256, 84),
        BlockType("Q3_K", 11, 256, 110),
        BlockType("Q4_K", 12, 256, 144),
        BlockType("Q5_K", 13, 256, 176),
        BlockType("Q6_K", 14, 256, 210),
        BlockType("IQ2_XXS", 16, 256, 66),
        BlockType("IQ2_XS", 17, 256, 74),
        BlockType("IQ3_XXS", 18, 256, 98),
        BlockType("IQ1_S", 19, 256, 50),
        BlockType("IQ4_NL", 20, 32, 18),
        BlockType("IQ3_S", 21, 256, 110),
        BlockType("IQ2_S", 22, 256, 82),
        BlockType("IQ4_XS", 23, 256, 136),
        BlockType("IQ1_M", 29, 256, 56),
        # An exponent, then numbers of 4 bits: 2 of exponent, 1 of mantissa (Open Compute Project,
        # Microscaling Formats 1.0).
        BlockType("MXFP4", 39, 32, 17),
    )
}

# 128 numbers of 8 bits (4 of exponent, 3 of mantissa), followed by their scale in float32.
# Checkpoints have a scale for each 128 by 128 numbers. Here each row has its own, at the cost of
# 1/32 more bytes, so that rows can be separated and joined.
F8_E4M3 = BlockType("F8_E4M3", 0, 128, 132)
# The high 5 bits of such numbers (`split_fp8`): a scale in float32, then the signs of 128 numbers,
# then 4 bits of each.
F8_HIGH = BlockType("F8_HIGH", 0, 128, 84)
# Blocks of which each has the scales of a GGUF block and the high 4 bits of its numbers
# (`split_quants`), by the name of that block's type.
HIGH_QUANTS = {
    "Q6_K": BlockType("Q6_K_HIGH", 0, 256, 146),
    "Q5_K": BlockType("Q5_K_HIGH", 0, 256, 144),
}
# Integers of 4 or 8 bits, in as many columns as share a scale and a zero (AWQ, GPTQ, W4A16, W8A16):
# number = (integer - zero) * scale. A block begins with the scale in float32, whose lowest 8 bits
# are the zero: scales of 16 bits leave them free. Then its integers follow. Those of 4 bits do up
# to 64 at a time: the first half of them is in the low bits of their bytes, the second half in the
# high bits.
INTEGERS = {
    bits: {
        elements: BlockType(f"INT{bits}_{elements}", 0, elements, 4 + elements * bits // 8)
        for elements in (128, 64, 32)
    }
    for bits in (4, 8)
}
OF_INTEGERS = tuple(kind for kinds in INTEGERS.values() for kind in kinds.values())
# 128 numbers of 4 bits (2 of exponent, 1 of mantissa): a factor in float32, a scale in F8_E4M3 for
# each 16 numbers, then the numbers, like integers of 4 bits. Checkpoints have one factor a matrix.
NVFP4 = BlockType("NVFP4", 0, 128, 76)
# The type of the high bits, by the name of that of a block that can be split.
HIGH_TYPES = {F8_E4M3.name: F8_HIGH, **HIGH_QUANTS}
# Numbers of 16 bits as blocks of one, which a model that computes in float32 keeps as they are.
NARROW = {
    "bfloat16": BlockType("BF16", 30, 1, 2),
    "float16": BlockType("F16", 1, 1, 2),
}
_OWN = (F8_E4M3, *HIGH_TYPES.values(), NVFP4, *OF_INTEGERS, *NARROW.values())
ALL_TYPES = BLOCK_TYPES | {kind.name: kind for kind in _OWN}
# Types whose numbers are in tables (`grids`), and the tables' sizes in words of 4 bytes.
WITH_TABLES = {"IQ3_XXS": 256, "IQ3_S": 512, "IQ2_XXS": 512, "IQ2_XS": 1024, "IQ2_S": 2048}
# Types that no kernel decodes.
WITHOUT_KERNELS = frozenset(name for name in ALL_TYPES if name.startswith("IQ1"))
