"""benchmarks/kernel.py, roofline.py and random_llama.py: formulas by hand, honest comparisons, runs on tiny shapes."""

import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import path, random_parents, words_of

from benchmarks import attention_candidates, kernel, random_llama, roofline
from benchmarks.paper_models import PAPER_MODELS
from benchmarks.roofline import Limits, Work, causal_work, find_peaks, tree_work
from pallas_kernels.tree_attention import IMPLEMENTATIONS, tree_attention
from specinfer_jax.models.transformer import param_shapes

UNKNOWN = Limits(1e9, math.nan, 1e9)


def device(**changes) -> kernel.Device:
    return kernel.Device(
        **{"dtype": "float32", "peaks": None, "measured": UNKNOWN, "repeats": 2, "seconds": 1e-9, **changes}
    )


def test_work_by_hand() -> None:
    # two slots of 10 and 0 tokens, 3 queries of 2 heads on one key/value head of 4 numbers, bfloat16
    work = tree_work(prefixes=[10, 0], Q=3, N=3, H=2, G=1, K=4, itemsize=2)
    keys, new = 2 * 10 * 4 * 2, 2 * 2 * 3 * 4 * 2
    queries, output = 2 * 3 * 2 * 4 * 2, 2 * 3 * 2 * 4 * 2
    words, lse = 2 * 3 * 1 * 4, 2 * 3 * 2 * 4
    assert work.bytes == keys + new + queries + output + words + lse
    assert work.flops == 2 * (2 * 4) * 2 * (3 * 10 + 3 * 3 + 3 * 3)  # two products, multiply and add, two heads


def test_work_of_the_bar() -> None:
    # H 32, G 8, K 128, 8 slots, 64 rows, 8,192 tokens: nearly all of it is keys and values
    work = attention_candidates.Problem("llama-3-8b", 64, 8192, 8).work(2)
    assert 2 * 8 * 8192 * 8 * 128 * 2 < work.bytes < 1.08 * 2 * 8 * 8192 * 8 * 128 * 2
    assert work.flops == 4 * 32 * 128 * 8 * 64 * (8192 + 64)


def test_words_grow_with_rows() -> None:
    one, two = (tree_work(prefixes=[0], Q=1, N=n, H=1, G=1, K=1, itemsize=4).bytes for n in (32, 33))
    assert two - one == 4 + 2 * 4


def test_causal_work_by_hand() -> None:
    work = causal_work(tokens=3, H=2, G=1, K=4, itemsize=2)
    assert work == Work(2 * 3 * 3 * 4 * 2, 4 * 2 * 4 * (1 + 2 + 3))


def test_peaks_are_found_by_whole_name() -> None:
    h200 = find_peaks("NVIDIA H200")
    assert h200 is not None
    assert (h200.bytes_per_second, h200.flops("bfloat16"), h200.flops("float32")) == (4.8e12, 989.5e12, 67e12)
    assert find_peaks("TPU v5 lite") == find_peaks("TPU v5e") != find_peaks("TPU v5")
    assert find_peaks("NVIDIA L40S") is None
    assert find_peaks("cpu") is None
    assert all(
        1e11 < peak.bytes_per_second < 1e13 and 1e14 < peak.bfloat16_flops < 1e15 for peak in roofline.PEAKS.values()
    )


def test_roofline_is_the_longer_time() -> None:
    limits = Limits(bytes_per_second=100.0, bfloat16_flops=1000.0, float32_flops=None)
    assert Work(200, 1000).seconds(limits, "bfloat16") == 2.0
    assert Work(200, 4000).seconds(limits, "bfloat16") == 4.0
    assert Work(200, 4000).seconds(limits, "float32") == 2.0  # an unknown rate limits nothing


@pytest.mark.parametrize("dtype", attention_candidates.DTYPES)
def test_limits_are_measured(dtype: str) -> None:
    limits = roofline.measure_limits(dtype, copy_bytes=2**16, size=32)
    assert limits.bytes_per_second > 0
    assert limits.flops(dtype) > 0
    other = limits.flops("float32" if dtype == "bfloat16" else "bfloat16")
    assert other is None or math.isnan(other)


def test_every_call_feeds_the_next() -> None:
    run = jax.jit(roofline.repeated(lambda q, x: q * x, 2))
    first, last = run(jnp.float32(1), [(jnp.float32(2),), (jnp.float32(3),)])
    assert (float(first), float(last)) == (2, 2 * (2 * 3) ** 2)


def test_calls_fill_the_time() -> None:
    work = Work(bytes=1000, flops=0)
    assert roofline.plan_calls(work, 1000, Limits(1e6, 1e6, 1e6), "float32", seconds=0.05) == (1, 50)
    assert roofline.plan_calls(work, 1000, Limits(1e6, 1e6, 1e6), "float32", seconds=1e9)[1] == roofline.MAX_CALLS


def test_dense_mask_is_the_tree() -> None:
    parent = random_parents(np.random.default_rng(0), 2, 40)
    mask = attention_candidates.dense_mask(np.asarray(words_of(parent)), context=5, padded=128)
    for b in range(2):
        for n in range(40):
            assert list(np.flatnonzero(mask[b, 0, n])) == [*range(5), *(5 + row for row in path(parent[b], n))]


def test_contiguous_rows_are_the_pages() -> None:
    pages = jnp.arange(3 * 4, dtype=jnp.float32).reshape(1, 3, 4, 1)
    rows = attention_candidates.contiguous(
        pages, jnp.full((1, 2, 1, 1), 99.0), jnp.array([[2, 0]], jnp.int32), context=6, padded=10
    )
    np.testing.assert_array_equal(rows[0, :, 0, 0], [8, 9, 10, 11, 0, 1, 99, 99, 0, 0])


def test_table_of_a_tiny_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernel, "measure_limits", lambda dtype: UNKNOWN)
    file = tmp_path / "deeper" / "kernel.json"
    code = kernel.main([
        "--shapes", "tiny", "--rows", "1,5", "--context", "40", "--slots", "2", "--page-size", "16",
        "--implementations", "xla", "--repeats", "2", "--milliseconds", "0.001", "--prefill", "512",
        "--json", str(file),
    ])  # fmt: skip
    assert code == 0
    result = json.loads(file.read_text())
    assert result["complete"]
    assert result["peaks"] is None
    assert [(p["rows"], p["context"], p["slots"], p["H"], p["G"], p["K"]) for p in result["problems"]] == [
        (1, 40, 2, 4, 2, 16), (5, 40, 2, 4, 2, 16),
    ]  # fmt: skip
    for entry in result["problems"] + result["prefill"]:
        assert entry["failed"] == []
        for row in entry["rows_measured"]:
            assert 0 < row["seconds_min"] <= row["seconds"]
            assert row["error"] < 1e-4
            assert row["share_of_peak"] is None
            assert row["share_of_measured"] > 0
            assert row["bytes_per_second"] == pytest.approx(entry["bytes"] / row["seconds"])
    assert {row["candidate"] for row in result["problems"][0]["rows_measured"]} >= {"default", "xla", "dense"}
    assert result["problems"][0]["skipped"]["jax paged"] == "needs a GPU or a TPU"
    assert result["problems"][1]["skipped"]["jax paged"] == "knows one query only"
    assert result["problems"][1]["skipped"]["dense cudnn"] == "needs an NVIDIA GPU"
    assert not result["problems"][0]["is_cold"]
    assert result["prefill"][0]["chunk"] == 256
    assert "[2/3" in capsys.readouterr().out


def test_wrong_kernel_gets_no_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def sees_everything(q, k_new, v_new, k_pages, v_pages, table, length, words, **options):
        return tree_attention(q, k_new, v_new, k_pages, v_pages, table, length, jnp.full_like(words, 0b111), **options)

    def attend(implementation, scale):
        function = sees_everything if implementation is None else tree_attention
        return lambda q, *arrays: function(q, *arrays, scale=scale, implementation=implementation)[0]

    monkeypatch.setattr(kernel, "measure_limits", lambda dtype: UNKNOWN)
    monkeypatch.setattr(attention_candidates, "attend", attend)
    file = tmp_path / "kernel.json"
    code = kernel.main([
        "--shapes", "tiny", "--rows", "3", "--context", "40", "--slots", "1", "--page-size", "16", "--repeats", "1",
        "--milliseconds", "0.001", "--without", "dense,tokamax", "--json", str(file),
    ])  # fmt: skip
    assert code == 1
    (entry,) = json.loads(file.read_text())["problems"]
    assert entry["rows_measured"] == []
    assert entry["failed"] == ["default"]
    assert entry["skipped"]["default"].startswith("Wrong: max|d| / max|ref|")
    assert entry["skipped"]["dense"] == "left out by --without"


def test_failing_candidate_is_named_and_the_rest_timed() -> None:
    q, right = jnp.ones((1, 1, 1, 2)), jnp.ones((1, 1, 1, 2))

    def refuses(q: jax.Array) -> jax.Array:
        raise NotImplementedError("no such shape\nand more")

    candidates = [
        attention_candidates.Candidate("fine", lambda q: q * 1.0, [()], right, 0.1),
        attention_candidates.Candidate("refuses", refuses, [()], right, 0.1),
        attention_candidates.Candidate("nan", lambda q: q * jnp.nan, [()], right, 0.1),
    ]
    rows, failed = kernel.measure(q, candidates, Work(8, 8), device(), trips=1)
    assert [row.candidate for row in rows] == ["fine"]
    assert failed["refuses"] == "NotImplementedError: no such shape"
    assert failed["nan"].startswith("Wrong: max|d| / max|ref| inf")


def test_limit_stops_cleanly(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernel, "measure_limits", lambda dtype: UNKNOWN)
    monkeypatch.setattr(kernel, "measure_problem", lambda *arguments, **options: pytest.fail("started"))
    assert kernel.main(["--limit-seconds", "1e-9", "--json", str(tmp_path / "kernel.json")]) == 0
    assert "2 of 2 left" in capsys.readouterr().out


def test_problem_that_does_not_fit_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def out_of_memory(*arguments, **options):
        raise RuntimeError("RESOURCE_EXHAUSTED: 9 TiB")

    monkeypatch.setattr(kernel, "measure_limits", lambda dtype: UNKNOWN)
    monkeypatch.setattr(kernel, "measure_problem", out_of_memory)
    assert kernel.main(["--json", str(tmp_path / "kernel.json")]) == 1
    problems = json.loads((tmp_path / "kernel.json").read_text())["problems"]
    assert [p["skipped"] for p in problems] == [{"all": "RuntimeError: RESOURCE_EXHAUSTED: 9 TiB"}] * 2


def test_tokamax_that_does_not_load_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str):
        raise AttributeError(f"module 'jax' has no attribute 'f' ({name})")

    monkeypatch.setattr(attention_candidates.importlib, "import_module", load)
    assert (
        attention_candidates.dense_calls(1.0)["tokamax"]
        == "AttributeError: module 'jax' has no attribute 'f' (tokamax)"
    )


def test_kernels_are_named_from_the_program() -> None:
    text = "%0 = stablehlo.custom_call @tpu_custom_call(%a) {}\n%1 = stablehlo.custom_call @Sharding(%b)\n"
    assert kernel.kernels_in(text) == ["Sharding", "tpu_custom_call"]


def test_check_on_this_device(tmp_path: Path) -> None:
    file = tmp_path / "check.json"
    assert kernel.main(["--check", "2", "--implementations", "xla", "--json", str(file)]) == 0
    found = json.loads(file.read_text())["check"]["xla"]
    assert (found["cases"], found["wrong"]) == (2, [])
    assert all(0 <= value <= 8e-3 for value in found["worst"].values())
    assert len(found["worst"]) >= 2


def test_check_finds_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def shifted(q, *arrays, **options):
        out, lse = tree_attention(q, *arrays, **options)
        return out * 1.02, lse

    monkeypatch.setattr(kernel, "tree_attention", shifted)
    assert kernel.main(["--check", "1"]) == 1
    assert "WRONG: attention_cases.random_case(0, shapes=1)" in capsys.readouterr().out


def test_check_reports_a_kernel_that_cannot_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert kernel.main(["--check", "1", "--implementations", "pallas_gpu"]) == 1
    assert "WRONG" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shapes", "llama-8b"], "unknown shape 'llama-8b'; known are llama-7b, opt-13b"),
        (["--dtype", "int8"], "unknown dtype 'int8'; known are bfloat16, float32"),
        (["--implementations", "cuda"], f"unknown implementation 'cuda'; known are {', '.join(IMPLEMENTATIONS)}"),
        (["--rows", "4"], "need --shapes"),
        (["--shapes", "tiny", "--rows", "257"], "rows must be from 1 to 256, got 257"),
        (["--shapes", "tiny", "--slots", "0"], "must be at least 1"),
        (["--shapes", "tiny", "--context", "-1"], "context at least 0"),
        (["--check", "0"], "must be at least 1"),
        (["--milliseconds", "0"], "must be above 0"),
        (["--prefill", "300"], "whole chunks of 256 tokens, got 300"),
    ],
)
def test_bad_arguments_are_named(arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=f"^error: .*{message}"):
        kernel.main(arguments)


def test_defaults_have_the_bar_first_and_every_shape() -> None:
    problems = kernel.default_problems(False)
    assert problems[0] == attention_candidates.Problem("llama-3-8b", 64, 8192, 8)
    assert len(set(problems)) == len(problems)
    assert {p.shape for p in problems[:4]} == {"llama-3-8b", "llama-7b", "opt-13b", "llama-65b"}


def test_random_weights_are_a_model() -> None:
    config = PAPER_MODELS["tiny"]
    params = random_llama.random_params(config, dtype="bfloat16")
    assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(
        lambda x: (x.shape, x.dtype), param_shapes(config, dtype="bfloat16")
    )


def test_random_llama_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_llama, "NODES", (1,))  # trees: tests/test_benchmarks.py
    file = tmp_path / "llama.json"
    random_llama.main([
        "--shape", "tiny", "--dtype", "float32", "--context", "20", "--prompt", "40", "--tokens", "12", "--rows", "8",
        "--hits", "2", "--repeats", "1", "--steps", "1", "--json", str(file),
    ])  # fmt: skip
    result = json.loads(file.read_text())
    assert [(row["nodes"], row["context"]) for row in result["verify"]] == [(1, 20)]
    decoding = result["decoding"]
    assert decoding["same_ids"]
    assert decoding["incremental"]["tokens_per_step"] == 1
    assert decoding["tree"]["tokens_per_step"] == 3  # two hits and the bonus token
    assert decoding["speedup"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hits", "22"], "hits must be from 0 to 21"),
        (["--rows", "1"], "at least 2 rows"),
        (["--context", "9000"], "at most 8064 fit"),
        (["--context", "x"], "invalid literal"),
        (["--tokens", "0"], "must be at least 1"),
    ],
)
def test_random_llama_refuses(arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=f"^error: .*{message}"):
        random_llama.main(arguments)
