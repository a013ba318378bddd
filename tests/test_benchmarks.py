"""The studies in benchmarks/: what they time is what they say, on tiny models and fake peers."""

from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_cases import llama_config

from benchmarks import peers, verify_cost
from benchmarks.peer_systems import PeerMissingError, llama_cpp_peer, require
from specinfer_jax.errors import ConfigError
from specinfer_jax.models.families import config_from_hf
from specinfer_jax.models.transformer import param_shapes
from specinfer_jax.speculation.sampling import neutral_sampling
from specinfer_jax.speculation.speculator import Context, ScriptedSpeculator
from specinfer_jax.tree.token_tree import check_invariants

CONFIG = config_from_hf(llama_config(num_hidden_layers=1))


@pytest.mark.parametrize("nodes", [1, 2, 5, 16, 33])
def test_scripted_tree_fills_the_pass(nodes: int) -> None:
    program = verify_cost.tree_program(CONFIG, nodes)
    assert program.num_rows == nodes
    assert program.buckets[-1] >= nodes
    for speculator in program.speculators:
        assert isinstance(speculator, ScriptedSpeculator)
        arrays = (jnp.full(shape, 1, jnp.int32) for shape in ((2, 8), (2,), (2,)))
        tree = speculator.script((), Context(*arrays, neutral_sampling(2, 8)))
        check_invariants(tree)
        assert np.asarray(tree.valid_BN).all()
        assert int(tree.depth_BN.max()) == speculator.depth == -(-(nodes - 1) // verify_cost.CHAINS)


def test_verify_cost_times_every_pair() -> None:
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype), param_shapes(CONFIG))
    cost = verify_cost.VerifyCost(params, CONFIG, max_model_len=64, dtype=jnp.dtype(jnp.float32))
    rows = verify_cost.measure(cost, [1, 6], [0, 20], repeats=2, steps=2)
    assert [(row.nodes, row.context) for row in rows] == [(1, 0), (6, 0), (1, 20), (6, 20)]
    assert all(0 < row.seconds_min <= row.seconds for row in rows)
    assert [row.ratio for row in rows[::2]] == [1.0, 1.0]
    parts = cost.parts(6, 20, repeats=1)
    assert set(parts) == {"attention", "matmuls and norms", "head"}


def test_verify_cost_refuses_what_does_not_fit() -> None:
    options = verify_cost.parse_arguments(["--nodes", "1,16", "--context", "60"])
    with pytest.raises(ConfigError, match="max_model_len 125; it is 64"):
        verify_cost.check_options(options, 64)


class FakePeer:
    """Answers at once with given ids."""

    weights = "none"

    def __init__(self, name: str, first_id: int) -> None:
        self.name, self._first_id = name, first_id
        self.calls: list[tuple[int, int]] = []

    def generate(self, prompt_ids: Sequence[int], num_tokens: int) -> list[int]:
        self.calls.append((len(prompt_ids), num_tokens))
        return list(range(self._first_id, self._first_id + num_tokens))


def test_peers_alternate_and_ids_are_compared() -> None:
    ours, same, other = FakePeer("ours", 0), FakePeer("same", 0), FakePeer("other", 7)
    rows = peers.measure([ours, same, other], [[1], [1, 2]], num_tokens=4, repeats=2)
    assert [(row.name, row.same_ids, row.prompts) for row in rows] == [("ours", 2, 2), ("same", 2, 2), ("other", 0, 2)]
    assert ours.calls == [(1, 2), *[(1, 1), (1, 4), (2, 1), (2, 4)] * 2]
    assert all(row.tokens_per_second > 0 for row in rows)


def test_peer_that_stops_early_is_an_error() -> None:
    class Short(FakePeer):
        def generate(self, prompt_ids: Sequence[int], num_tokens: int) -> list[int]:
            return [0]

    with pytest.raises(RuntimeError, match="short returned 1 tokens instead of 4"):
        peers.measure([Short("short", 0)], [[1]], num_tokens=4, repeats=1)


def test_missing_peers_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(PeerMissingError, match="no-such-package not installed"):
        require("numpy", "no-such-package")
    with pytest.raises(PeerMissingError):
        llama_cpp_peer(tmp_path, max_model_len=8)
    peers.print_table([], {"llama.cpp": "llama-cpp-python not installed"})
    assert "left out: llama.cpp (llama-cpp-python not installed)" in capsys.readouterr().out
