"""The scheduler, without a model: ranks, chunks, pages, shared prefixes, preemption, and what must always hold."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specinfer_jax.errors import ConfigError
from specinfer_jax.serving.pages import PagePool, prefix_keys
from specinfer_jax.serving.request_manager import PATIENCE, RequestManager
from specinfer_jax.serving.schedule import Prefill

Z, A = 4, 3


def make(**settings) -> RequestManager:
    default = {"num_slots": 2, "num_pages": 16, "page_size": Z, "max_model_len": 32, "step_tokens": A, "chunks": (8, 4)}
    return RequestManager(**(default | settings))


class Device:
    """Does what a manager says, and knows what every page then holds."""

    def __init__(self, manager: RequestManager) -> None:
        self.manager = manager
        self.page: dict[int, list[int]] = {p: [] for p in range(manager.num_pages)}
        self.works: list[Prefill] = []
        self.computed = 0
        """Prompt tokens that a pass was spent on."""

    def write(self, index: int, start: int, tokens: list[int]) -> None:
        entry = next(s for s in self.manager.slots if s is not None and s.index == index)
        for position, token in enumerate(tokens, start):
            page, offset = entry.pages[position // Z], position % Z
            assert self.manager.pool_of(entry.slot or 0).holders(page) == 1, "a shared page is written"
            self.page[page] = [*self.page[page][:offset], token]

    def check_contents(self) -> None:
        """Every running request's pages hold its own tokens."""
        for entry in self.manager.slots:
            if entry is not None:
                cached = len(entry.tokens) - 1 if entry.decodes else entry.prefilled
                held = [t for page in entry.pages for t in self.page[page]]
                assert held[:cached] == entry.tokens[:cached]

    def prefill(self, most: int | None = None) -> int:
        done = 0
        while (most is None or done < most) and (work := self.manager.next_prefill()) is not None:
            self.works.append(work)
            entry = self.manager.slots[work.slot]
            assert entry is not None and entry.index == work.index
            assert entry.prefilled == work.start
            assert (work.size == 0) == (work.count == 0)
            self.write(work.index, work.start, entry.tokens[work.start : work.start + work.count])
            self.computed += work.count
            done += work.size > 0
            self.manager.prefilled(work)
        return done

    def steps(self, most: int, commit) -> None:
        """All decoding slots commit `commit(entry)` tokens in each step."""
        steps = self.manager.start_steps(most)
        for entry in self.manager.decoding():
            for _ in range(steps):
                new = commit(entry)[: entry.limit - len(entry.tokens)]
                assert len(entry.pages) * Z >= len(entry.tokens) - 1 + len(new), "a step outgrows its pages"
                self.write(entry.index, len(entry.tokens) - 1, [entry.tokens[-1], *new][: len(new)])
                self.manager.advance(entry.index, new)
        self.manager.collected(steps)


def test_ranks_decide_who_enters_and_waiting_ends() -> None:
    manager = make(num_slots=1)
    device = Device(manager)
    for index, priority in ((0, 0), (1, 1), (2, 0), (3, -1)):
        manager.add(index, [index + 1], 5, priority=priority)
    order = []
    while not manager.is_idle:
        device.prefill()
        [entry] = manager.decoding()
        order.append(entry.index)
        manager.end(entry.index)
    assert order == [3, 0, 2, 1]
    # a better priority overtakes so often and no more often
    manager.add(100, [1], 5, priority=1)
    for index in range(101, 101 + PATIENCE + 5):
        manager.add(index, [1], 5)
    entered = []
    for _ in range(PATIENCE + 1):
        device.prefill()
        entered.append(manager.decoding()[0].index)
        manager.end(entered[-1])
    assert 100 in entered[-3:]


def test_a_prompt_comes_in_chunks_and_the_last_token_stays_out() -> None:
    manager = make()
    device = Device(manager)
    manager.add(0, list(range(1, 19)), 20)
    for _ in range(4):
        device.prefill(most=1)
    assert [(w.start, w.size, w.count, w.is_new, w.is_last) for w in device.works] == [
        (0, 8, 8, True, False), (8, 8, 8, False, False), (16, 4, 1, False, True),
    ]  # fmt: skip
    manager.add(1, [7], 9)
    device.prefill()
    assert (device.works[-1].size, device.works[-1].is_last) == (0, True)


def test_those_who_decode_wait_for_one_chunk_at_most() -> None:
    """Five prompts of ten times a stream's length: between two of its steps comes one pass, or what is allowed."""
    for passes in (1, 2):
        manager = make(num_slots=6, num_pages=96, max_model_len=64, chunks=(8, 4))
        device = Device(manager)
        manager.add(0, [1, 2, 3, 4], 60)
        manager.secure(passes=passes)
        device.prefill()
        for index in range(1, 6):
            manager.add(index, [10 * index + k % 7 for k in range(40)], 42)
        between = []
        while any(entry is None or not entry.decodes for entry in manager.slots):
            assert manager.secure(passes=passes) == []
            between.append(device.prefill())
            running = [entry.index for entry in manager.decoding()]
            assert running[0] == 0, "the stream takes part in every step"
            device.steps(1, lambda entry: [7])
        assert max(between) == passes and sum(between) >= 5 * 5
        manager.secure()
        manager.add(9, [9] * 20, 21)
        manager.end(1)
        assert device.prefill() == 3, "without a limit prompts are prefilled whole"


def test_a_shared_prefix_is_prefilled_once() -> None:
    manager = make(num_slots=8, num_pages=64)
    device = Device(manager)
    prompt = list(range(1, 15))
    for index in range(8):
        manager.add(index, [*prompt, 50 + index], 20)
    while device.prefill(most=1):
        pass
    # 14 tokens go in; 12 of them fill pages, which the first one alone computes
    assert device.computed == 14 + 7 * 2
    assert [w.start for w in device.works if w.is_new] == [0] + [12] * 7
    device.check_contents()
    assert manager.pages_used == 3 + 8 * 2


def test_what_shares_nothing() -> None:
    manager = make(num_slots=4, num_pages=64)
    device = Device(manager)
    prompt = list(range(1, 12))
    manager.add(0, prompt, 20)
    manager.add(1, prompt, 20, salt=b"x")
    manager.add(2, prompt, 20, shares=False)
    manager.add(3, [9, *prompt[1:]], 20)
    device.prefill()
    assert [w.start for w in device.works if w.is_new] == [0, 0, 0, 0]
    assert prefix_keys(prompt, Z)[1] != prefix_keys([9, *prompt[1:]], Z)[1], "a key stands for all before it"


def test_finished_prompts_stay_until_their_pages_are_needed() -> None:
    manager = make(num_slots=1, num_pages=8)
    device = Device(manager)
    first, second = list(range(1, 14)), list(range(21, 34))

    def once(index: int, prompt: list[int]) -> int:
        manager.add(index, prompt, len(prompt) + 1)
        device.prefill()
        manager.end(index)
        assert manager.pages_used == 0
        return [w.start for w in device.works if w.is_new][-1]

    assert once(0, first) == 0
    assert once(1, first) == 12
    assert once(2, second) == 0
    assert manager.pool_of(0).kept == 6
    assert once(3, list(range(41, 72))) == 0  # needs all eight pages
    assert once(4, first) == 0


def test_the_last_page_of_a_run_is_given_up_first() -> None:
    pool = PagePool(4)
    pages = pool.take(3)
    keys = prefix_keys(range(3 * Z), Z)
    for page, key in zip(pages, keys, strict=True):
        pool.publish(page, key)
    pool.drop(pages)
    pool.take(2)  # the free one, and one that is kept
    assert pool.find(keys) == pages[:2]


def test_pages_that_run_out_put_the_last_rank_back() -> None:
    # case B049
    manager = make(num_slots=3, num_pages=9)
    device = Device(manager)
    for index in range(3):
        manager.add(index, [10 * index + i for i in range(1, 9)], 30)
    finished: list[int] = []
    preempted: list[int] = []
    for _ in range(200):
        preempted += manager.secure()
        device.prefill(most=1)
        device.steps(1, lambda entry: [entry.index] * A)
        device.check_contents()
        for entry in [s for s in manager.slots if s is not None and len(s.tokens) == s.limit]:
            finished.append(entry.index)
            manager.end(entry.index)
        if manager.is_idle:
            break
    assert finished == [0, 1, 2]
    assert preempted and 0 not in preempted
    assert manager.preemptions == len(preempted)
    assert manager.pages_used == 0


def test_a_burst_never_outgrows_its_pages() -> None:
    # case B050
    manager = make(num_slots=2, num_pages=10)
    device = Device(manager)
    manager.add(0, [1] * 5, 30)
    manager.add(1, [2] * 5, 9)
    device.prefill()
    device.steps(1_000, lambda entry: [entry.index] * A)
    steps = (len(manager.decoding()[0].tokens) - 5) / A
    assert 2 <= steps <= 9, "several, but no more than the pages hold"


def test_pages_for_steps_on_the_way_are_counted() -> None:
    manager = make(num_slots=1, num_pages=8)
    Device(manager).prefill()
    manager.add(0, [1] * 5, 30)
    Device(manager).prefill()
    for on_the_way in (1, 2, 3):
        manager.secure()
        assert manager.start_steps(1) == 1
        [entry] = manager.decoding()
        assert len(entry.pages) * Z >= 4 + on_the_way * A


def test_a_pool_that_holds_no_request_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 8 pages"):
        make(num_pages=7)


def test_lost_caches_leave_what_waits() -> None:
    manager = make(num_slots=1)
    device = Device(manager)
    manager.add(0, list(range(12)), 30)
    manager.add(1, list(range(12)), 30)
    device.prefill()
    assert manager.forget_caches() == [0]
    assert manager.pages_used == 0
    device.prefill()
    assert device.works[-1].start + device.works[-1].count == 11
    assert [w.start for w in device.works if w.is_new] == [0, 0], "nothing is shared with a lost page"


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32), num_slots=st.integers(1, 4), spare=st.integers(0, 12), on_the_way=st.booleans(),
    num_groups=st.integers(1, 2),
)  # fmt: skip
def test_what_must_always_hold(seed: int, num_slots: int, spare: int, on_the_way: bool, num_groups: int) -> None:
    """Contents are right, shared pages are not written, everybody ends, and all pages come back."""
    rng = random.Random(seed)
    manager = make(num_slots=num_slots * num_groups, num_pages=(8 + spare) * num_groups, num_groups=num_groups)
    device = Device(manager)
    started = ended = iterations = 0
    while started < 30 or not manager.is_idle:
        iterations += 1
        assert iterations < 5_000, "somebody starves"
        if started < 30 and rng.random() < 0.4:
            shared = [7] * rng.choice([0, 4, 8, 13])
            tokens = [*shared, *(rng.randrange(3) for _ in range(rng.randint(1, 12)))]
            limit = rng.randint(len(tokens) + 1, 32)
            manager.add(started, tokens, limit, priority=rng.choice([0, 0, 1, -1]), shares=rng.random() < 0.9)
            started += 1
        if rng.random() < 0.05 and started:
            ended += manager.end(rng.randrange(started))
        manager.secure()
        device.prefill(most=rng.choice([1, 1, 2, None]))
        if on_the_way and rng.random() < 0.3 and manager.decoding():  # a step whose results come late
            early = manager.start_steps(1)
            manager.secure()
            device.steps(1, lambda entry: [rng.randrange(3)] * rng.randint(1, A))
            manager.collected(early)
        else:
            device.steps(rng.choice([1, 1, 50]), lambda entry: [rng.randrange(3)] * rng.randint(1, A))
        device.check_contents()
        for slot, table in enumerate(manager.tables()):
            group = slot // num_slots
            assert all(group * (8 + spare) <= page < (group + 1) * (8 + spare) for page in table)
        for entry in [s for s in manager.slots if s is not None and len(s.tokens) == s.limit]:
            ended += manager.end(entry.index)
    assert ended == started
    assert manager.pages_used == 0
    assert manager.num_waiting == manager.num_running == 0
