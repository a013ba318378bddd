"""The TPU kernel's view of a paged prefix: pages copied from HBM block by block, one block ahead of the products.

Letters beside the project's key: S, the tokens of a block.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

LANES = 128
"""Numbers side by side in a TPU's tiles."""


class Prefix(NamedTuple):
    """One slot's prefix as a stream of blocks through the two halves of a buffer: all blocks for each grid step."""

    table: Any
    """The block tables of all slots, flat."""
    first_entry: Any
    """Where the slot's entries begin."""
    length: Any
    """Tokens of the slot."""
    step: Any
    """Grid step within the slot: row blocks of the first KV head, then those of the second, and so on."""
    steps: Any
    row_blocks: Any
    """Grid steps of one KV head."""
    pages: tuple[Any, Any]
    """Keys and values in HBM, [G, P, Z, K] or [G, P, K, Z]."""
    buffers: tuple[Any, Any]
    """Keys and values in VMEM, [2, pages of a block, Z, K] or [2, K, S]."""
    semaphores: Any
    """[keys or values, half]"""
    token_axis: int
    """Axis of the tokens in a page: 0 or 1."""

    @property
    def page_tokens(self) -> int:
        return self.pages[0].shape[2 + self.token_axis]

    @property
    def block_tokens(self) -> int:
        buffer = self.buffers[0]
        return buffer.shape[1] * self.page_tokens if self.token_axis == 0 else buffer.shape[2]

    def half(self, step: Any, block: Any) -> Any:
        """Which half of the buffers a block goes through."""
        return lax.rem(step * lax.div(self.length + self.block_tokens - 1, self.block_tokens) + block, 2)

    def start(self, block: Any) -> None:
        """Start copying a block. The one after the last is the next step's first: it is here when that step begins."""
        past = block * self.block_tokens >= self.length
        self._each_page(self.step + past.astype(jnp.int32), jnp.where(past, 0, block), lambda copy: copy.start())

    def wait(self, block: Any, *, whole: bool) -> None:
        """Wait until a block is here; `whole` says that all its pages were copied."""
        rows, lanes = self.pages[0].shape[2:]
        if whole and rows % 16 == 0 and lanes % LANES == 0:
            # Whole tiles: the pages' bytes add up to the buffer's, and one wait does for all.
            half = self.half(self.step, block)
            for which, buffer in enumerate(self.buffers):
                pltpu.make_async_copy(buffer.at[half], buffer.at[half], self.semaphores.at[which, half]).wait()
        else:
            self._each_page(self.step, block, lambda copy: copy.wait())

    def _each_page(self, step: Any, block: Any, act: Callable[[Any], None]) -> None:
        """Apply `act` to the copies of a block's pages, as many as hold tokens; there are none after the last step."""
        half, kv_head = self.half(step, block), lax.div(step, self.row_blocks)
        block_pages = self.block_tokens // self.page_tokens
        first_page = block * block_pages

        def one_page(i: Any, _: None) -> None:
            page = self.table[self.first_entry + first_page + i]
            for which, buffer in enumerate(self.buffers):
                if self.token_axis == 0:
                    target = buffer.at[half, i]
                else:
                    lane = pl.multiple_of(i * self.page_tokens, LANES)
                    target = buffer.at[half, :, pl.ds(lane, self.page_tokens)]
                act(pltpu.make_async_copy(self.pages[which].at[kv_head, page], target, self.semaphores.at[which, half]))

        used_pages = lax.div(self.length + self.page_tokens - 1, self.page_tokens)
        count = jnp.where(step < self.steps, jnp.clip(used_pages - first_page, 0, block_pages), 0)
        lax.fori_loop(0, count, one_page, None)

    def read(self, block: Any, dtype: Any) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
        """Return the keys and values of a block that is here, [S, K] or [K, S]."""
        k, v = (buffer[self.half(self.step, block)].astype(dtype) for buffer in self.buffers)
        return (k, v) if self.token_axis == 1 else (k.reshape(-1, k.shape[-1]), v.reshape(-1, v.shape[-1]))
