"""What the decode step works on: its static program, its device state, and the record of one step."""

import dataclasses
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from specinfer_jax.models.config import ModelConfig
from specinfer_jax.models.kv_cache import KVCache
from specinfer_jax.models.transformer import Params
from specinfer_jax.outputs import MAX_LOGPROBS
from specinfer_jax.speculation.rules import NAIVE, uses_draws
from specinfer_jax.speculation.sampling import ChosenLogprobs, SamplingState
from specinfer_jax.speculation.speculator import Speculator, SpeculatorState
from specinfer_jax.speculation.verifier import Verdict
from specinfer_jax.tree.token_tree import ROW_BUCKETS, TokenTree

RUNNING, STOPPED, LENGTH, FAILED = 0, 1, 2, 3
"""Values of `DecodeState.finish_B`: still decoding; a stop token was committed; the limit was reached; no token could
be chosen (NaN logits, or every id is banned)."""


class StepStats(NamedTuple):
    """Counters of every slot's request; kept tokens only."""

    steps_BJ: Int[Array, "B J"]
    """LLM passes by row bucket."""
    proposed_BA: Int[Array, "B A"]
    """Entry d: steps whose verified tree reached depth d (entry 0: all steps)."""
    accepted_BA: Int[Array, "B A"]
    """Entry d: steps in which at least d nodes were accepted and kept (entry 0: all steps)."""
    proposed_BM: Int[Array, "B M"]
    """Verified nodes by speculator that proposed them."""
    accepted_BM: Int[Array, "B M"]
    """Accepted and kept nodes by speculator that proposed them."""


class LastStep(NamedTuple):
    """What the newest step committed, for hosts that look at every step."""

    source_BA: UInt32[Array, "B A"]
    """By committed token: bit m: speculator m had proposed it; 0 for bonus tokens and behind the kept ones."""
    logprobs: ChosenLogprobs
    """Of the tokens, entry `slot * A + index`; zeros unless a slot asks for them."""


class DecodeState(NamedTuple):
    """All device state of the slots; donated to every step."""

    token_BS: Int[Array, "B S"]
    """Prompt and committed tokens."""
    committed_B: Int[Array, " B"]
    """Number of those tokens."""
    prompt_len_B: Int[Array, " B"]
    """Tokens of the prompt."""
    limit_B: Int[Array, " B"]
    """Tokens at which the request ends with reason length."""
    active_B: Bool[Array, " B"]
    """The slot decodes a request."""
    finish_B: Int[Array, " B"]
    """RUNNING, STOPPED, LENGTH or FAILED."""
    is_stop_BV: Bool[Array, "B V"]
    """Token ids that end the slot's request."""
    sampling: SamplingState
    """How the slot's tokens are chosen."""
    cache: KVCache
    """The LLM's cache; between steps its length is committed - 1."""
    speculators: tuple[SpeculatorState, ...]
    """State of every speculator (an SSM's cache)."""
    allowed_Bn: Bool[Array, "B n"]
    """Which rows of the speculators' trees, side by side and without their roots, the slot's request wants."""
    max_nodes_B: Int[Array, " B"]
    """Most nodes of the slot's merged tree, the likeliest where the gate is on; not where draws count (narrow.py)."""
    rate_BJ: Float[Array, "B J"]
    """Running acceptance rates of all kinds of nodes, speculators side by side."""
    stats: StepStats
    """Counters."""
    last: LastStep
    """The newest step."""


@dataclasses.dataclass(frozen=True)
class StepProgram:
    """Static description of a step: what is compiled."""

    llm: ModelConfig
    """The verifying model."""
    speculators: tuple[Speculator, ...] = ()
    """Proposers; their trees are merged. None: incremental decoding."""
    adaptive: bool = True
    """Let the acceptance gate cut or skip trees; False verifies every tree whole."""
    max_rows: int = 128
    """With the gate: rows of the largest pass, root included; of larger trees the likeliest nodes are kept."""
    verification: str = NAIVE
    """Rule in slots with a temperature (rules.py); greedy slots walk along the argmax."""
    vocab_limit: int | None = None
    """Ids from here on are padding and never emitted; None: the tokenizer knows all of them."""
    implementation: str | None = None
    """Attention kernel; None picks."""
    splits_vocab: bool = False
    """The vocabulary is split over devices: ids from `vocab_limit` on are banned, but stay in all arrays."""
    offloads: bool = False
    """The LLM's weights lie in host memory and are streamed layer by layer; such a program is not adaptive."""

    @property
    def num_rows(self) -> int:
        """The root and every node that can be proposed."""
        return 1 + sum(s.num_nodes for s in self.speculators)

    @property
    def path_len(self) -> int:
        """A: longest path, root included."""
        return 1 + max((s.depth for s in self.speculators), default=0)

    @property
    def vocab_size(self) -> int:
        """Entries of arrays over ids; of ids that may be emitted, unless the vocabulary is split."""
        return self.llm.vocab_size if self.splits_vocab else self.vocab_limit or self.llm.vocab_size

    @property
    def num_logprobs(self) -> int:
        """Alternatives per token where log-probabilities are asked for."""
        return min(MAX_LOGPROBS, self.llm.vocab_size - self.llm.num_padding_ids)

    @property
    def keeps_draws(self) -> bool:
        """The verifier needs to know what children were drawn from; trees of slots with a temperature are never cut."""
        return uses_draws(self.verification)

    @property
    def buckets(self) -> tuple[int, ...]:
        """Row counts compiled: the smallest that holds the whole tree, and with the gate those on the way."""
        rows = min(self.num_rows, self.max_rows) if self.adaptive and not self.keeps_draws else self.num_rows
        whole = next((bucket for bucket in ROW_BUCKETS if bucket >= rows), rows)
        if self.offloads:  # a pass takes as long as its weights need to arrive, whatever its rows
            return (whole,)
        if not self.adaptive:
            return (1, whole) if whole > 1 else (1,)
        return (*(rows for rows in ROW_BUCKETS if rows < whole and rows != 2), whole)

    @property
    def num_kinds(self) -> int:
        """Acceptance statistics of all speculators."""
        return sum(s.num_kinds for s in self.speculators)

    def prior_rates(self) -> np.ndarray:
        """float32 `[num_kinds]`."""
        return np.concatenate([np.zeros(0, np.float32), *(s.prior_rates() for s in self.speculators)])


class DecodeParams(NamedTuple):
    """Parameters of the LLM and, in the order of the speculators, of the SSMs."""

    llm: Params
    """The LLM's."""
    speculators: tuple[Any, ...] = ()
    """One entry per speculator; `()` for those without parameters."""


class StepTrace(NamedTuple):
    """What one step did, for drawing and debugging."""

    tree: TokenTree
    """The whole proposal of every slot, rows that were cut before verification included."""
    verified_rows: Int[Array, ""]
    """How many of its rows the LLM saw."""
    source_BN: UInt32[Array, "B N"]
    """Bit m: speculator m proposed this node. 0 for root and padding."""
    verdict: Verdict
    """The accepted path and the bonus token."""
    kept_B: Int[Array, " B"]
    """Tokens committed; fewer than accepted + 1 where a stop token or the limit came first."""
