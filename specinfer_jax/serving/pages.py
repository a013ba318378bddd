"""Which cache pages hold what: a free list, reference counts, and full pages of prompts kept for whoever shares them.

    prompt A  [t0 t1 t2 t3][t4 t5 t6 t7][t8]       page size 4: two full pages, and one that only A may write
    keys           k0           k1                 k1 = digest(k0, t4..t7): a key stands for everything before it, too
    prompt B  [t0 t1 t2 t3][t9 ...                 finds k0, takes a reference to its page, goes on in one of its own

One page id means the same place in the LLM's cache and in every SSM's: all have the same pages. Free of jax.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

Key = bytes
"""Stands for the tokens of a page and all before it."""


def prefix_keys(tokens: Sequence[int], page_size: int, *, salt: bytes = b"") -> list[Key]:
    """The keys of all full pages of a context.

    Args:
      tokens: ids.
      page_size: Z, tokens of a page.
      salt: contexts with different salts share nothing.
    """
    keys, key = [], hashlib.blake2b(salt, digest_size=16).digest()
    for start in range(0, len(tokens) - page_size + 1, page_size):
        page = array("q", tokens[start : start + page_size]).tobytes()
        key = hashlib.blake2b(key + page, digest_size=16).digest()
        keys.append(key)
    return keys


class PagePool:
    """All pages of the caches. A page is free, held by one or more sequences, or kept for its content alone."""

    def __init__(self, num_pages: int, *, first: int = 0) -> None:
        """Pages `first`, `first + 1`, ..., all free."""
        self.num_pages = num_pages
        self._free = list(range(first + num_pages - 1, first - 1, -1))
        self._holders = dict.fromkeys(self._free, 0)
        self._key_of: dict[int, Key] = {}
        self._page_of: dict[Key, int] = {}
        self._kept: OrderedDict[int, None] = OrderedDict()
        """Pages without a holder whose content may be wanted again; the first is given up first."""

    @property
    def available(self) -> int:
        """Pages that `take` can give."""
        return len(self._free) + len(self._kept)

    @property
    def used(self) -> int:
        """Pages that a sequence holds."""
        return self.num_pages - self.available

    @property
    def kept(self) -> int:
        """Pages that nobody holds, with content that may be wanted again."""
        return len(self._kept)

    def holders(self, page: int) -> int:
        """Sequences that hold a page."""
        return self._holders[page]

    def take(self, count: int) -> list[int]:
        """Pages for one holder to write; contents that nobody has asked for longest are given up for them.

        Raises:
          ValueError: fewer are available.
        """
        if count > self.available:
            raise ValueError(f"{count} pages are wanted and {self.available} are available")
        pages = [self._free.pop() if self._free else self._give_up() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def find(self, keys: Sequence[Key]) -> list[int]:
        """The pages of the longest known run of keys from the first on; holds none of them."""
        pages = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def hold(self, pages: Sequence[int]) -> None:
        """Another holder for pages that `find` has just given; it may read them, and nobody writes them."""
        for page in pages:
            self._kept.pop(page, None)
            self._holders[page] += 1

    def count_kept(self, pages: Sequence[int]) -> int:
        """How many of them nobody holds: holding them makes as many fewer available."""
        return sum(self._holders[page] == 0 for page in pages)

    def publish(self, page: int, key: Key) -> None:
        """Let others find a full page. Of two pages with the same content the first stays the one that is found."""
        if key not in self._page_of and page not in self._key_of:
            self._key_of[page], self._page_of[key] = key, page

    def drop(self, pages: Sequence[int]) -> None:
        """One holder fewer. Of a run that nobody holds, the last page is given up first: no other leads to it."""
        for page in reversed(pages):
            if self._holders[page] < 1:
                raise ValueError(f"nobody holds page {page}")
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            if page in self._key_of:
                self._kept[page] = None
            else:
                self._free.append(page)

    def _give_up(self) -> int:
        page, _ = self._kept.popitem(last=False)
        del self._page_of[self._key_of.pop(page)]
        return page
