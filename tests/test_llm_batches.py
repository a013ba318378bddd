"""Many prompts in one call, a progress bar, shared prefixes and speculation by request, through LLM and AsyncLLM."""

import asyncio
import json
from collections.abc import Iterator

import jax.numpy as jnp
import pytest
import tiny_model

from specinfer_jax import LLM, SamplingParams, Speculation
from specinfer_jax.async_llm import AsyncLLM
from specinfer_jax.errors import ConfigError
from specinfer_jax.opened import Model, open_model
from specinfer_jax.outputs import StreamOutput
from specinfer_jax.serving.request_speculation import RequestSpeculation

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tiny_model.write_folder(tmp_path_factory.mktemp("model"))
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"max_position_embeddings": 512}))  # two pages and more
    return open_model(folder, dtype=jnp.dtype(jnp.float32))


@pytest.fixture(scope="module")
def plain(model: Model) -> LLM:
    return LLM(model, speculation=Speculation.off(), max_model_len=256, max_num_seqs=4)


def test_many_prompts_keep_their_order(plain: LLM) -> None:
    prompts = [[5 + i % 7, 9 + i % 11] for i in range(400)]
    params = [SamplingParams(temperature=0, max_tokens=1 + i % 5, ignore_eos=True) for i in range(400)]
    outputs = plain.generate(prompts, params)
    assert [len(output.token_ids) for output in outputs] == [1 + i % 5 for i in range(400)]
    assert [output.request_id for output in outputs] == [str(i) for i in range(400)]
    for i in (0, 76, 399):
        assert outputs[i].token_ids == plain.generate([prompts[i]], params[i])[0].token_ids
        assert outputs[i].prompt_token_ids == prompts[i]


def test_a_progress_bar_is_shown_on_request(plain: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    plain.generate([[5], [6]], GREEDY)
    assert capsys.readouterr() == ("", "")
    plain.generate([[5], [6]], GREEDY, use_tqdm=True)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "2/2" in shown.err and "12 tokens" in shown.err


def test_continuations_of_one_prompt_share_it(plain: LLM) -> None:
    prompt = [(3 * i) % 90 for i in range(150)]
    params = SamplingParams(temperature=1, seed=2, n=3, max_tokens=4)
    output = plain.generate([prompt], params)[0]
    assert output.stats is not None
    assert output.stats.cached_tokens == 2 * 128
    unshared = LLM(
        plain.model, speculation=Speculation.off(), max_model_len=256, max_num_seqs=1, shares_prefixes=False
    ).generate([prompt], params)[0]
    assert [one.token_ids for one in output.outputs] == [one.token_ids for one in unshared.outputs]
    assert unshared.stats is not None and unshared.stats.cached_tokens == 0


def test_caches_that_hold_no_request_are_refused(model: Model) -> None:
    with pytest.raises(ConfigError, match="1 cache pages of 128 tokens do not hold one request"):
        LLM(model, speculation=Speculation.off(), max_model_len=256, cache_tokens=128)


def test_parts_must_match_the_prompts(plain: LLM) -> None:
    with pytest.raises(ConfigError, match="2 prompts need one RequestSpeculation or 2"):
        plain.generate([[5], [6]], GREEDY, speculation=[None])


@pytest.fixture(scope="module")
def serving(model: Model) -> Iterator[AsyncLLM]:
    made = AsyncLLM(model, max_model_len=256, max_num_seqs=2, cache_tokens=384)
    yield made
    asyncio.run(made.drain(10))


async def pieces(llm: AsyncLLM, prompt: list[int], **options: RequestSpeculation) -> list[StreamOutput]:
    return [piece async for piece in llm.generate(prompt, GREEDY, request_id=str(prompt[-1]), **options)]


def test_figures_of_pages_and_shared_prefixes(serving: AsyncLLM) -> None:
    prefix = [(5 * i) % 90 for i in range(130)]

    async def all_of_them() -> list[list[StreamOutput]]:
        return [await pieces(serving, [*prefix, i]) for i in range(3)]

    found = asyncio.run(all_of_them())
    assert [answer[-1].stats.cached_tokens for answer in found if answer[-1].stats] == [0, 128, 128]
    snapshot = serving.snapshot()
    assert (snapshot.cached_prompt_tokens, snapshot.prompt_tokens) == (256, 3 * 131)
    assert (snapshot.pages_total, snapshot.pages_used) == (3, 0)


def test_requests_without_speculation_beside_others(serving: AsyncLLM) -> None:
    async def both() -> list[list[StreamOutput]]:
        off = RequestSpeculation(enabled=False)
        return await asyncio.gather(pieces(serving, [7] * 9, speculation=off), pieces(serving, [7] * 9))

    alone, beside = asyncio.run(both())
    assert [i for piece in alone for i in piece.token_ids] == [i for piece in beside for i in piece.token_ids]
    assert alone[-1].stats is not None
    assert alone[-1].stats.steps == alone[-1].stats.tokens == 6
    assert sum(alone[-1].stats.proposed_by_position) == 0
