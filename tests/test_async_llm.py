"""AsyncLLM: requests side by side equal requests alone; priorities, cancels, time-outs, faults, the end."""

import asyncio
import functools
import time
from collections.abc import Coroutine, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import tiny_model

from specinfer_jax import LLM, SamplingParams, Speculation
from specinfer_jax.async_llm import AsyncLLM
from specinfer_jax.errors import PromptError, SamplingError, SpeculationError
from specinfer_jax.opened import open_model
from specinfer_jax.outputs import StreamOutput
from specinfer_jax.serving.async_protocol import (
    AsyncEngine,
    EngineDeadError,
    QueueFullError,
    RequestCancelledError,
    RequestSpeculation,
    RequestTimeoutError,
)
from specinfer_jax.serving.device import step_costs

PROMPTS = [[5, 9, 17], [30], [8, 8, 8, 8, 40, 41], [60, 12]]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncLLM]:
    model = open_model(tiny_model.write_folder(tmp_path_factory.mktemp("model")), dtype=jnp.dtype(jnp.float32))
    made = AsyncLLM(model, max_model_len=96, max_num_seqs=2, max_queue=6)
    yield made
    asyncio.run(made.drain(10))
    assert not made.is_ready()


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    async def limited() -> Any:
        return await asyncio.wait_for(coroutine, 60)

    return asyncio.run(limited())


async def collect(llm: AsyncLLM, prompt: list[int], params: SamplingParams, **options: Any) -> dict[int, list[int]]:
    ids: dict[int, list[int]] = {}
    async for piece in llm.generate(list(prompt), params, request_id=str(prompt), **options):
        ids.setdefault(piece.index, []).extend(piece.token_ids)
    return ids


def test_it_is_what_the_server_asks_for(llm: AsyncLLM) -> None:
    assert isinstance(llm, AsyncEngine)
    assert llm.is_ready()
    assert llm.encode_chat([{"role": "user", "content": "hi"}]) == llm.tokenizer.encode_chat(
        [{"role": "user", "content": "hi"}]
    )


def test_side_by_side_equals_alone(llm: AsyncLLM) -> None:
    alone = LLM(llm._llm.model, speculation=Speculation.off(), max_model_len=96)
    settings = [
        SamplingParams(temperature=0, max_tokens=20),
        SamplingParams(temperature=1, seed=3, max_tokens=25, n=2),
        SamplingParams(temperature=0.7, seed=4, max_tokens=9),
        SamplingParams(temperature=0, max_tokens=30, ignore_eos=True),
    ]

    async def all_at_once() -> list[dict[int, list[int]]]:
        return await asyncio.gather(*(collect(llm, p, s) for p, s in zip(PROMPTS, settings, strict=True)))

    for found, prompt, params in zip(run(all_at_once()), PROMPTS, settings, strict=True):
        expected = alone.generate([prompt], params)[0].outputs
        assert found == {output.index: output.token_ids for output in expected}
    snapshot = llm.snapshot()
    assert (snapshot.queued, snapshot.running, snapshot.slots) == (0, 0, 2)
    assert snapshot.generated_tokens >= 20 + 9
    assert sum(snapshot.step_seconds.counts) == snapshot.steps > 0


def test_counters_equal_a_recount(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    # case B083: with trees and without, one that ends in the midst of what a step commits
    engine = llm._llm.engine
    trees_pay = step_costs(np.linspace(1.0, 1.01, len(engine.program.buckets)), [0.0])
    monkeypatch.setattr(engine, "_costs", trees_pay)
    monkeypatch.setattr(engine, "_choice", None)  # no plain steps in between
    plan = [
        ([8, 8, 8, 8, 40, 41], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True), None),
        ([3, 4] * 6, SamplingParams(temperature=0, max_tokens=23, ignore_eos=True), None),
        ([60, 12], SamplingParams(temperature=0, max_tokens=5), RequestSpeculation(enabled=False)),
    ]

    async def last_piece(prompt: list[int], params: SamplingParams, wanted: RequestSpeculation | None) -> StreamOutput:
        pieces = llm.generate(prompt, params, request_id=str(prompt), speculation=wanted)
        return [piece async for piece in pieces][-1]

    async def all_at_once() -> list[StreamOutput]:
        return await asyncio.gather(*(last_piece(*entry) for entry in plan))

    before = llm.snapshot()
    stats = [piece.stats for piece in run(all_at_once()) if piece.stats is not None]
    after = llm.snapshot()
    assert len(stats) == len(plan) and sum(stats[0].proposed_by_position) > 0 == sum(stats[2].proposed_by_position)
    assert after.generated_tokens - before.generated_tokens == sum(s.tokens for s in stats) == 40 + 23 + 5
    assert after.prompt_tokens - before.prompt_tokens == 6 + 12 + 2
    assert after.cached_prompt_tokens - before.cached_prompt_tokens == sum(s.cached_tokens for s in stats)
    for name in ("proposed_by_position", "accepted_by_position"):
        old, new = getattr(before, name), getattr(after, name)
        added = [count - (old[i] if i < len(old) else 0) for i, count in enumerate(new)]
        assert added == [sum(counts) for counts in zip(*(getattr(s, name) for s in stats), strict=True)], name
    for name in ("proposed_by_speculator", "accepted_by_speculator"):
        added = getattr(after, name)["ngram"] - getattr(before, name).get("ngram", 0)
        assert added == sum(getattr(s, name)["ngram"] for s in stats), name


def test_a_closed_stream_frees_its_slot(llm: AsyncLLM) -> None:
    async def first_piece() -> None:
        stream = llm.generate([7, 7], SamplingParams(temperature=0, max_tokens=90, ignore_eos=True), request_id="a")
        await anext(stream)
        assert llm.snapshot().running == 1
        await stream.aclose()
        assert llm.snapshot().running == 0
        assert await collect(llm, [30], SamplingParams(temperature=0, max_tokens=3))

    before = llm.snapshot().cancelled
    run(first_piece())
    assert llm.snapshot().cancelled == before + 1


def test_refusals(llm: AsyncLLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4)
    with pytest.raises(PromptError, match="empty"):
        run(collect(llm, [], params))
    with pytest.raises(PromptError, match="at most 95"):
        run(collect(llm, [5] * 96, params))
    with pytest.raises(SamplingError, match="99999"):
        run(collect(llm, [5], SamplingParams(logit_bias={99_999: 1.0})))
    with pytest.raises(QueueFullError, match="0 of 6"):
        run(collect(llm, [5], SamplingParams(n=7, seed=0)))
    with pytest.raises(SpeculationError, match="no speculator 'ssm'; this LLM has ngram"):
        run(collect(llm, [5], params, speculation=RequestSpeculation(ssms=("ssm",))))
    with pytest.raises(SpeculationError, match="needs an SSM"):
        run(collect(llm, [5], params, speculation=RequestSpeculation(tree="1,1")))
    with pytest.raises(RequestTimeoutError, match="took more than 0"):
        run(collect(llm, [5], params, timeout=0.0))
    assert llm.snapshot().running == 0


def test_lower_priorities_go_first(llm: AsyncLLM) -> None:
    async def finish_order() -> list[str]:
        order: list[str] = []

        async def one(name: str, priority: int) -> None:
            await collect(llm, [9, 9], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True), priority=priority)
            order.append(name)

        busy = [asyncio.create_task(one("busy", 0)) for _ in range(2)]  # both slots
        while llm.snapshot().running < 2 or llm.snapshot().queued:
            await asyncio.sleep(0.001)
        late = [asyncio.create_task(one("late", 5)) for _ in range(2)]
        await asyncio.sleep(0)
        early = [asyncio.create_task(one("early", -1)) for _ in range(2)]
        await asyncio.gather(*busy, *late, *early)
        return order

    assert run(finish_order())[2:] == ["early", "early", "late", "late"]


def test_a_fault_fails_what_it_hits_and_the_engine_goes_on(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def fails_once(compiled: Any, *arguments: Any) -> Any:
        calls.append(None)
        if len(calls) == 2:
            raise RuntimeError("device lost")
        return compiled(*arguments)

    for name in ("_burst", "_plain_burst"):
        monkeypatch.setattr(llm._llm.engine, name, functools.partial(fails_once, getattr(llm._llm.engine, name)))

    async def last_piece() -> Any:
        pieces = llm.generate([5, 9], SamplingParams(temperature=0, max_tokens=50, ignore_eos=True), request_id="f")
        return [piece async for piece in pieces][-1]

    assert run(last_piece()).finish_reason == "error"
    params = SamplingParams(temperature=0, max_tokens=8)
    expected = LLM(llm._llm.model, speculation=Speculation.off(), max_model_len=96).generate([[5, 9]], params)
    assert run(collect(llm, [5, 9], params)) == {0: expected[0].outputs[0].token_ids}


def test_draining_gives_up_what_is_left(tmp_path_factory: pytest.TempPathFactory) -> None:
    model = open_model(tiny_model.write_folder(tmp_path_factory.mktemp("other")), dtype=jnp.dtype(jnp.float32))
    llm = AsyncLLM(model, speculation=Speculation.off(), max_num_seqs=1)
    compiled = llm._llm.engine._burst

    def slow(*arguments: Any) -> Any:
        time.sleep(0.02)
        return compiled(*arguments)

    llm._llm.engine._burst = slow

    async def drained() -> None:
        endless = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
        task = asyncio.create_task(collect(llm, [5], endless))
        while not llm.snapshot().generated_tokens and not llm.snapshot().running:
            await asyncio.sleep(0.01)
        await llm.drain(0.05)
        with pytest.raises(RequestCancelledError):
            await task
        with pytest.raises(EngineDeadError, match="no more"):
            await collect(llm, [5], endless)

    run(drained())
    assert not llm.is_ready()
