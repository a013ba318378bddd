"""Every file under configs/ loads, and the paper's settings are what the paper says."""

from pathlib import Path

import pytest

from specinfer_jax.config import DEFAULT_MODEL, DEFAULT_TREE, LLMConfig, SamplingParams, Speculation, load_config
from specinfer_jax.errors import ConfigError
from specinfer_jax.tree.expand import parse_expansion

CONFIGS = Path(__file__).parent.parent / "configs"
FILES = sorted(file for kind in ("models", "trees", "meshes") for file in (CONFIGS / kind).glob("*.toml"))


def test_every_file_is_of_a_known_kind() -> None:
    training = set((CONFIGS / "train").glob("*.toml"))  # tests/test_train_settings.py
    assert training and set(CONFIGS.rglob("*")) == {*FILES, *training, *(file.parent for file in (*FILES, *training))}


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_every_file_loads(file: Path) -> None:
    config = load_config(file)
    assert config != LLMConfig() or file.stem in (DEFAULT_MODEL, "single")
    if file.parent.name == "trees":
        assert config.speculation.tree is not None
        assert parse_expansion(config.speculation.tree).num_nodes <= 127
        assert LLMConfig(speculation=config.speculation) == config  # nothing but speculation: fits any model


def test_trees_of_the_paper() -> None:
    def tree(name: str) -> Speculation:
        return load_config(CONFIGS / "trees" / f"{name}.toml").speculation

    assert tree("paper_expansion") == Speculation(tree="1,1,3,1,1,1,1,1", adaptive=False)
    assert tree("paper_expansion") == tree("paper_width_3")
    for width in range(1, 6):
        expansion = parse_expansion(tree(f"paper_width_{width}").tree or "")
        assert expansion.widths == (1, 1, width, 1, 1, 1, 1, 1)
        assert (expansion.depth, expansion.num_nodes) == (8, 2 + 6 * width)
    assert tree("default").tree == DEFAULT_TREE


def test_a_tree_laid_over_a_pair_of_models() -> None:
    pair = load_config(CONFIGS / "models" / "llama-7b.toml")
    both = load_config(CONFIGS / "trees" / "paper_expansion.toml", base=pair)
    assert both.model == "huggyllama/llama-7b"
    assert both.speculation == Speculation(ssms=("JackFram/llama-68m",), tree="1,1,3,1,1,1,1,1", adaptive=False)
    assert both.sampling.max_tokens == 128
    assert not both.speculation.uses_ngram


def test_a_file_changes_only_what_it_sets(tmp_path: Path) -> None:
    file = tmp_path / "some.toml"
    file.write_text("max_num_seqs = 3\n[sampling]\nignore_eos = true\n")
    base = LLMConfig("some-model", "bfloat16", 64, 2, Speculation.off(), SamplingParams(max_tokens=7))
    sampling = SamplingParams(max_tokens=7, ignore_eos=True)
    expected = LLMConfig("some-model", "bfloat16", 64, 3, Speculation.off(), sampling)
    assert load_config(file, base=base) == expected
    assert load_config(file) == LLMConfig(max_num_seqs=3, sampling=SamplingParams(temperature=0, ignore_eos=True))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("modle = 'x'", "unknown key 'modle'; known are model, dtype, max_model_len"),
        ("[speculation]\nwidth = 3", "unknown key 'speculation.width'; known are ssms, tree, ngram"),
        ("speculation = 3", "speculation must be a table, got 3"),
        ("[sampling]\ntemperature = -0.5", "temperature must be a finite number of at least 0, got -0.5"),
        ("[sampling]\nn = 2", "n must be 1 at temperature 0"),
        ("model = ", "is not a TOML file"),
    ],
)
def test_files_that_are_refused(text: str, sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=sentence) as refusal:
        load_config(file)
    assert str(file) in str(refusal.value)


def test_files_are_greedy_unless_they_set_a_temperature(tmp_path: Path) -> None:
    file = tmp_path / "drawn.toml"
    file.write_text(
        "[sampling]\ntemperature = 0.8\nn = 2\nseed = -3\nstop = ['a', 'b']\nlogit_bias = { 7 = -1, 3 = 2.5 }\n"
    )
    drawn = load_config(file).sampling
    assert (drawn.temperature, drawn.n, drawn.seed, drawn.stop) == (0.8, 2, -3, ("a", "b"))
    assert drawn.logit_bias == ((3, 2.5), (7, -1.0))
    assert LLMConfig().sampling == SamplingParams(temperature=0)
