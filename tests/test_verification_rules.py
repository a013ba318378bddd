"""Which pairs of children and verification run, and that what is refused would really change the LLM's law."""

import numpy as np
import pytest
from enumeration import Proposal, emitted_law
from exact_law import TableModel, distance, independent, likeliest, one_after_the_other

from specinfer_jax.errors import SpeculationError
from specinfer_jax.speculation.rules import CHILDREN, VERIFICATION, exact_pair

V = 4
PATHS = 1 + V + V**2

WRONG = {
    ("top_k", "mss"): (likeliest, False, "are not drawn"),
    ("top_k", "mss_renormalized"): (likeliest, True, "are not drawn"),
    ("iid", "mss_renormalized"): (independent, True, "may repeat"),
    ("without_replacement", "mss"): (one_after_the_other, False, "cannot come again"),
}


def model_of(seed: int, vocab: int) -> TableModel:
    """Ids from `vocab` on have probability 0."""
    logits_PV = np.random.default_rng(seed).normal(scale=1.3, size=(PATHS, V)).astype(np.float32)
    logits_PV[:, vocab:] = -np.inf
    return TableModel(logits_PV)


def laws_of(seed: int, vocab: int) -> np.ndarray:
    return model_of(seed, vocab).laws(2)


@pytest.mark.parametrize(("pair", "wrong"), WRONG.items(), ids=map("-".join, WRONG))
def test_refused_for_a_reason(pair, wrong) -> None:
    draw, renormalize, reason = wrong
    children, verification = pair
    with pytest.raises(SpeculationError, match=reason) as refused:
        exact_pair(children, verification)
    assert repr(children) in str(refused.value) and repr(verification) in str(refused.value)
    assert "'naive'" in str(refused.value)
    for widths, vocab in (((2,), 4), ((2, 1), 3)):
        model = model_of(1, vocab)
        law = emitted_law(
            model,
            [Proposal(widths, laws_of(2, vocab), draw)],
            length=len(widths) + 1,
            renormalize=renormalize,
        )
        assert distance(law, model.joint(len(widths) + 1)) > 0.003


def test_every_other_pair_runs() -> None:
    for children in CHILDREN:
        for verification in VERIFICATION:
            if (children, verification) not in WRONG:
                assert exact_pair(children, verification) == (children, verification)


def test_the_missing_half_is_filled_in() -> None:
    assert exact_pair(None, None) == ("top_k", "naive")
    assert exact_pair(None, "mss") == ("iid", "mss")
    assert exact_pair(None, "mss_renormalized") == ("without_replacement", "mss_renormalized")
    assert exact_pair("without_replacement", None) == ("without_replacement", "mss_renormalized")
    for children, verification in ((None, "greedy"), (None, "naive"), *((c, None) for c in CHILDREN)):
        assert exact_pair(*exact_pair(children, verification))


@pytest.mark.parametrize("names", [("beam", None), (None, "top_k"), ("iid", "MSS")])
def test_unknown_names(names) -> None:
    with pytest.raises(SpeculationError, match="must be one of"):
        exact_pair(*names)
