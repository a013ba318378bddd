"""Tile sizes of the kernels by shape and chip: one table a hardware, read by the kernel of that hardware.

Letters: R = Q * H / G, the query rows that share a key/value head; Z page size; K head size.
"""

from typing import NamedTuple

TPU_ROW_BLOCK = 512
"""Most rows that share one read of the prefix: 64 queries with a group of 8."""

TPU_BLOCK_TOKENS = ((64, 1024), (256, 512), (TPU_ROW_BLOCK, 256))
"""(up to this many rows, prefix tokens of a block): few rows leave time and memory for more copies in flight."""

TPU_TOKEN_BYTES = 512
"""Bytes of a cached key up to which a block has that many tokens; twice the bytes halve it."""


def tpu_blocks(*, rows: int, page_size: int, head_size: int, table_pages: int, itemsize: int) -> tuple[int, int]:
    """Return the rows of a row block and the pages of a prefix block of the TPU kernel.

    `rows` is R, `itemsize` the bytes of a number in the kernel's products. Everything then fits 16 MiB of VMEM, which
    is what a kernel gets on the smallest targets (v4, v5e), up to N = 256 and K = 256 in float32.
    """
    blocks = -(-rows // TPU_ROW_BLOCK)
    # Several row blocks must be whole lanes of the log-sum-exp's row; a single one only whole tiles of the queries.
    multiple = 128 if blocks > 1 else 32 // itemsize
    row_block = -(-rows // (blocks * multiple)) * multiple

    tokens = next(tokens for most_rows, tokens in TPU_BLOCK_TOKENS if row_block <= most_rows)
    tokens //= max(1, max(head_size, 128) * itemsize // TPU_TOKEN_BYTES)
    return row_block, min(max(1, tokens // page_size), table_pages)


class GpuBlocks(NamedTuple):
    """How one program of the GPU kernel is cut."""

    rows: int
    """Query rows, a power of two, at least 16."""
    tokens: int
    """Keys of a tile, a power of two, at least 16."""
    num_warps: int
    num_stages: int
    """Steps of a loop that overlap. Finding a page takes one, so 3 load a tile while the one before is computed."""
    multiprocessors: int
    """Of the chip. A card with fewer gets more splits than it needs."""


GPU_CHIPS = {
    "8.0": ("ampere", 108),
    "8.6": ("small", 84),
    "8.9": ("small", 128),
    "9.0": ("hopper", 132),
}
"""Class of chip and multiprocessors by compute capability; others are taken for 8.6, whose 99 KiB all newer have."""

GPU_HALF_TILES = {
    "small": {64: (128, 64, 8), 128: (64, 32, 4), 256: (32, 32, 4)},
    "ampere": {64: (128, 64, 8), 128: (128, 32, 8), 256: (64, 32, 8)},
    "hopper": {64: (128, 128, 8), 128: (128, 64, 8), 256: (64, 32, 4)},
}
"""Most rows, and with that many the tokens and warps, for two-byte operands by class of chip and width of the tiles.

The largest for which ptxas spills at most a few registers (sm_80, sm_86, sm_90); none was chosen by timing.
"""

GPU_FLOAT_TILES = {64: (32, 32, 4), 128: (32, 16, 8), 256: (16, 16, 4)}
"""The same for float32 on every chip: true float32 has no tensor cores, and its operands wait in registers."""


def gpu_blocks(rows: int, head_dim: int, itemsize: int, compute_capability: str | None = None) -> GpuBlocks:
    """Choose the tiles for `rows` (R) query rows of a key/value head.

    `itemsize`: bytes of an operand of the dots. `compute_capability`: such as "8.0"; None takes what fits every chip.
    Raises ValueError for heads of more than 256.
    """
    if head_dim > 256:
        raise ValueError(f"The GPU kernel has no tiles for a head size of {head_dim}; 256 is the largest.")
    chip, multiprocessors = GPU_CHIPS.get(compute_capability or "8.6", GPU_CHIPS["8.6"])
    width = next(width for width in (64, 128, 256) if head_dim <= width)
    table = GPU_HALF_TILES[chip] if itemsize <= 2 else GPU_FLOAT_TILES
    most_rows, tokens, warps = table[width]
    tile_rows = min(most_rows, max(16, 1 << (rows - 1).bit_length()))
    if itemsize <= 2 and tile_rows <= 32 and width <= 128:
        tokens = 64  # few rows leave registers for more keys
    stages = 3 if itemsize <= 2 else 2
    return GpuBlocks(tile_rows, tokens, warps if tile_rows == most_rows else 4, stages, multiprocessors)
