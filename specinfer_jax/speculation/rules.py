"""How children are chosen, how they are verified, and which pairs of the two leave the LLM's distribution unchanged.

At temperature 0 every slot takes the likeliest children and the greedy walk; the rules say what happens above it.
Free of jax.
"""

from specinfer_jax.errors import SpeculationError

TOP_K, IID, WITHOUT_REPLACEMENT = "top_k", "iid", "without_replacement"
CHILDREN = {
    TOP_K: "the SSM's k likeliest tokens, chosen without randomness",
    IID: "k independent draws from the SSM",
    WITHOUT_REPLACEMENT: "k different tokens drawn one after the other from the SSM (Gumbel top-k)",
}
"""Rules for an SSM's children."""

GREEDY, NAIVE, MSS, MSS_RENORMALIZED = "greedy", "naive", "mss", "mss_renormalized"
VERIFICATION = {
    GREEDY: "the LLM's argmax; requests with a temperature are refused",
    NAIVE: "draw from the LLM, go on where the token is a child (naive sampling)",
    MSS: "accept a draw with min(1, p/q), else take q out of p (SpecInfer, Algorithm 2)",
    MSS_RENORMALIZED: "the same, q renormalised over what its SSM has not drawn yet",
}
"""Rules for the verifier."""

_PARTNER = {TOP_K: NAIVE, IID: MSS, WITHOUT_REPLACEMENT: MSS_RENORMALIZED}
_NOT_DRAWN = "the likeliest tokens are not drawn from the SSM's distribution, so accepting them with p/q favours them"
_NOT_EXACT = {
    (TOP_K, MSS): _NOT_DRAWN,
    (TOP_K, MSS_RENORMALIZED): _NOT_DRAWN,
    (IID, MSS_RENORMALIZED): "independent draws may repeat a token, so q must stay as it is after a rejected one",
    (WITHOUT_REPLACEMENT, MSS): "a token once drawn cannot come again, so q must be renormalised after a rejected one",
}


def exact_pair(children: str | None, verification: str | None) -> tuple[str, str]:
    """The pair to run; what is None is filled in.

    Without both: top_k and naive. Of the exact pairs it gives the most tokens per second on the default model (measured
    in docs/log.md): it may cut trees where a row is not worth its time, and the tokens are incremental decoding's own.

    Raises:
      SpeculationError: unknown names, or a pair whose output would not be the LLM's; the message says why.
    """
    for name, value, known in (("children", children, CHILDREN), ("verification", verification, VERIFICATION)):
        if value is not None and value not in known:
            raise SpeculationError(f"{name} must be one of {', '.join(known)}, got {value!r}")
    if children is None:
        children = next((c for c, v in _PARTNER.items() if v == verification), TOP_K)
    if verification is None:
        verification = _PARTNER[children]
    reason = _NOT_EXACT.get((children, verification))
    if reason is not None:
        exact = " or ".join(repr(rule) for rule in dict.fromkeys((_PARTNER[children], NAIVE)))
        raise SpeculationError(
            f"children={children!r} with verification={verification!r} would change the LLM's distribution: {reason}; "
            f"use verification={exact}"
        )
    return children, verification


def uses_draws(verification: str) -> bool:
    """Whether the verifier must know what each child was drawn from."""
    return verification in (MSS, MSS_RENORMALIZED)
