"""The scheduler: who is in which slot, which chunk of which prompt comes next, who holds which pages. Free of jax.

    waiting --admit--> prefilling --last chunk--> decoding --end--> gone
       ^                   |                         |
       +------- preempted, when pages run out -------+      keeps its tokens; they are prefilled again

It decides and keeps the books; the engine does what it says, one iteration after the other:

    manager.secure(passes=1)                    # pages for everybody's next step; may preempt
    while (work := manager.next_prefill(...)):  # admissions and chunks, one at a time
        ...; manager.prefilled(work)
    steps = manager.start_steps(...)            # of all decoding slots together
    manager.collected(steps); manager.advance(index, new_tokens); manager.end(index)

Rank is the order of everything: a lower one is admitted first and preempted last. It is the arrival number, and each
step of priority counts for `PATIENCE` arrivals, so that whoever waits is overtaken so often and no more often.
"""

import heapq
from collections.abc import Sequence

from specinfer_jax.errors import ConfigError
from specinfer_jax.serving.pages import PagePool, prefix_keys
from specinfer_jax.serving.schedule import Entry, Prefill

PATIENCE = 256
"""Later arrivals that may overtake a waiting request for each step that their priority is better by."""
_PAGES_AHEAD = 4
"""Pages that a burst of many steps takes for a slot beyond what the next step needs."""


class RequestManager:
    """All decisions of the engine; every method returns at once."""

    def __init__(
        self, *, num_slots: int, num_pages: int, page_size: int, max_model_len: int, step_tokens: int,
        chunks: Sequence[int], shares_prefixes: bool = True, num_groups: int = 1,
    ) -> None:  # fmt: skip
        """Everything free.

        Args:
          num_slots: B.
          num_pages: P, of the caches.
          page_size: Z.
          max_model_len: most tokens of a request.
          step_tokens: most tokens that a step commits in one slot.
          chunks: rows that prefill passes may have, largest first.
          shares_prefixes: let requests begin with pages that others filled.
          num_groups: runs of slots of equal length that each have a run of the pages to themselves (devices that hold
            different slots' caches).

        Raises:
          ConfigError: the pages do not hold one request of the greatest length.
        """
        longest = -(-max_model_len // page_size)
        if num_slots % num_groups or num_pages % num_groups:
            raise ConfigError(f"{num_slots} slots and {num_pages} cache pages must divide into {num_groups} groups")
        if num_pages // num_groups < longest:
            raise ConfigError(
                f"{num_pages // num_groups} cache pages of {page_size} tokens do not hold one request of max_model_len "
                f"{max_model_len}; at least {longest} pages are needed"
            )
        self.num_slots, self.page_size = num_slots, page_size
        self._step_tokens, self._chunks, self._shares = step_tokens, tuple(chunks), shares_prefixes
        self.num_pages, self._num_groups = num_pages, num_groups
        self._pools = self._all_free()
        self.slots: list[Entry | None] = [None] * num_slots
        self._by_index: dict[int, Entry] = {}
        self._waiting: list[tuple[tuple[int, int], Entry]] = []
        self._arrivals = self._steps_on_the_way = 0
        self._passes_left: int | None = None
        self.preemptions = 0
        """Times that a request was put back because pages ran out."""

    @property
    def is_idle(self) -> bool:
        """No request anywhere."""
        return not self._by_index

    @property
    def pages_used(self) -> int:
        """Pages that requests in slots hold."""
        return sum(pool.used for pool in self._pools)

    @property
    def num_waiting(self) -> int:
        """Requests without a slot."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests in slots."""
        return sum(sequence is not None for sequence in self.slots)

    def decoding(self) -> list[Entry]:
        """Those whose prompt is in the cache, first rank first."""
        return sorted((s for s in self.slots if s is not None and s.decodes), key=lambda s: s.order)

    def tables(self) -> list[list[int]]:
        """Every slot's pages, in order."""
        return [[] if sequence is None else list(sequence.pages) for sequence in self.slots]

    def add(
        self, index: int, tokens: Sequence[int], limit: int, *, priority: int = 0, shares: bool = True,
        salt: bytes = b"",
    ) -> None:  # fmt: skip
        """A new request waits.

        Args:
          index: a name that no other request has.
          tokens: its prompt, at least one id.
          limit: tokens at which it ends, prompt included; at most max_model_len.
          priority: lower goes first.
          shares: whether it may begin with pages that others filled.
          salt: it shares with requests of the same salt only.
        """
        if index in self._by_index:
            raise ValueError(f"there is a request {index} already")
        rank = priority * PATIENCE + self._arrivals
        self._arrivals += 1
        sequence = Entry(index, rank, list(tokens), limit, shares and self._shares, salt)
        self._by_index[index] = sequence
        self._wait(sequence)

    def advance(self, index: int, new_tokens: Sequence[int]) -> None:
        """A step has committed tokens."""
        self._by_index[index].tokens.extend(new_tokens)

    def end(self, index: int) -> bool:
        """Forget a request that has finished or is not wanted any more; False if there is none."""
        sequence = self._by_index.pop(index, None)
        if sequence is None:
            return False
        if sequence.slot is None:
            self._waiting = [entry for entry in self._waiting if entry[1] is not sequence]
            heapq.heapify(self._waiting)
        else:
            self._leave(sequence)
        return True

    def forget_caches(self) -> list[int]:
        """The caches are lost, and the requests in slots with them: all pages are free, nothing is shared.

        Returns:
          Those requests' indices. What waits goes on waiting.
        """
        lost = [sequence.index for sequence in self.slots if sequence is not None]
        for index in lost:
            self.end(index)
        self._pools = self._all_free()
        self._steps_on_the_way = 0
        return lost

    def secure(self, *, passes: int | None = None) -> list[int]:
        """A new iteration: pages for every decoding slot's next step; where they run out, the last rank is put back.

        Args:
          passes: most prefill passes in this iteration, which are what those who decode wait for; None: any number.

        Returns:
          The indices of those who were preempted.
        """
        self._passes_left = passes
        preempted: list[int] = []
        for sequence in self.decoding():
            while sequence.slot is not None and not self._extend(sequence, self._tokens_after(sequence, 1)):
                victim = max(self._running(self._pool(sequence)), key=lambda s: s.order)
                self._leave(victim)
                self._wait(victim)
                self.preemptions += 1
                preempted.append(victim.index)
        return preempted

    def next_prefill(self) -> Prefill | None:
        """The next chunk, of the first rank that is prefilling or can be admitted; None: no more in this iteration.

        What it returns must be done and reported by `prefilled` before it is asked again.
        """
        if self._passes_left == 0:
            return None
        begun = min((s for s in self.slots if s is not None and not s.decodes), key=lambda s: s.order, default=None)
        head = self._waiting[0][1] if self._waiting else None
        is_new = head is not None and (begun is None or head.order < begun.order) and self._admit(head)
        sequence = head if is_new else begun
        if sequence is None or sequence.slot is None:
            return None
        left = sequence.prefill_end - sequence.prefilled
        size = 0 if left <= 0 else next((c for c in self._chunks if c <= left), min(self._chunks))
        count = min(size, left) if size else 0
        return Prefill(
            sequence.index, sequence.slot, is_new, sequence.prefilled, size, count, is_last=count == max(left, 0)
        )

    def prefilled(self, work: Prefill) -> None:
        """The device has been told to do it: full pages can be shared from now on."""
        sequence = self._by_index[work.index]
        sequence.prefilled += work.count
        sequence.decodes = work.is_last
        if work.size and self._passes_left is not None:
            self._passes_left -= 1
        if self._shares:
            full = sequence.prefilled // self.page_size
            for i in range(work.start // self.page_size, min(full, len(sequence.keys))):
                self.pool_of(work.slot).publish(sequence.pages[i], sequence.keys[i])

    def start_steps(self, most: int) -> int:
        """How many steps the decoding slots may take now without running out of pages, at most `most`; 0: none decodes.

        Those steps are on the way until `collected`.
        """
        decoding = self.decoding()
        if not decoding:
            return 0
        steps = most
        for sequence in decoding:
            steps = min(steps, self._steps_ahead(sequence, most))
        steps = max(steps, 1)
        self._steps_on_the_way += steps
        return steps

    def collected(self, steps: int) -> None:
        """What so many steps have committed is known."""
        self._steps_on_the_way -= steps

    def pool_of(self, slot: int) -> PagePool:
        """Where a slot's pages come from."""
        return self._pools[slot * self._num_groups // self.num_slots]

    def _all_free(self) -> list[PagePool]:
        size = self.num_pages // self._num_groups
        return [PagePool(size, first=group * size) for group in range(self._num_groups)]

    def _running(self, pool: PagePool) -> list[Entry]:
        return [s for s in self.slots if s is not None and self._pool(s) is pool]

    def _pool(self, sequence: Entry) -> PagePool:
        assert sequence.slot is not None
        return self.pool_of(sequence.slot)

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _tokens_after(self, sequence: Entry, steps: int) -> int:
        """Most tokens in the cache after the steps on the way and so many more."""
        most = len(sequence.tokens) - 1 + (self._steps_on_the_way + steps) * self._step_tokens
        return min(sequence.limit - 1, most)

    def _extend(self, sequence: Entry, tokens: int) -> bool:
        """Pages for so many tokens; False if there are too few."""
        missing = self._pages_for(tokens) - len(sequence.pages)
        pool = self._pool(sequence)
        if missing > pool.available:
            return False
        if missing > 0:
            sequence.pages += pool.take(missing)
        return True

    def _reserve(self, pool: PagePool) -> int:
        """Pages that those in the slots may need soon, one each: nobody should enter only to give them back."""
        return sum(self._pages_for(s.limit - 1) > len(s.pages) for s in self._running(pool))

    def _steps_ahead(self, sequence: Entry, most: int) -> int:
        """Steps that a slot's pages allow; for several it takes some pages ahead, unless others may need them."""
        wanted = min(self._tokens_after(sequence, most), (len(sequence.pages) + _PAGES_AHEAD) * self.page_size)
        missing = self._pages_for(wanted) - len(sequence.pages)
        pool = self._pool(sequence)
        ahead = min(missing, pool.available - self._reserve(pool)) if most > 1 else 0
        if ahead > 0:
            sequence.pages += pool.take(ahead)
        room = len(sequence.pages) * self.page_size
        if room >= sequence.limit - 1:
            return most
        return (room - (len(sequence.tokens) - 1)) // self._step_tokens - self._steps_on_the_way

    def _admit(self, sequence: Entry) -> bool:
        """Give the first in the queue a slot, the shared pages it can use, and pages for prompt and first step."""
        free = {self.pool_of(b): b for b, owner in reversed(list(enumerate(self.slots))) if owner is None}
        if not free:
            return False
        if self._shares and not sequence.keys:  # of pages that are full without the last token
            sequence.keys = prefix_keys(sequence.tokens[:-1], self.page_size, salt=sequence.salt)
        found = {pool: pool.find(sequence.keys) if sequence.shares else [] for pool in free}
        pool = max(free, key=lambda pool: (len(found[pool]), pool.available))
        shared = found[pool]
        most = min(sequence.limit - 1, len(sequence.tokens) - 1 + self._step_tokens)
        new = self._pages_for(most) - len(shared)
        if new + pool.count_kept(shared) + self._reserve(pool) > pool.available:
            return False
        heapq.heappop(self._waiting)
        pool.hold(shared)
        sequence.pages = shared + pool.take(new)
        sequence.prefilled, sequence.decodes = len(shared) * self.page_size, False
        sequence.slot = free[pool]
        self.slots[free[pool]] = sequence
        return True

    def _leave(self, sequence: Entry) -> None:
        """Out of the slot; the pages go back."""
        assert sequence.slot is not None
        self._pool(sequence).drop(sequence.pages)
        self.slots[sequence.slot] = None
        sequence.slot, sequence.pages, sequence.keys = None, [], []
        sequence.prefilled, sequence.decodes = 0, False

    def _wait(self, sequence: Entry) -> None:
        heapq.heappush(self._waiting, (sequence.order, sequence))
