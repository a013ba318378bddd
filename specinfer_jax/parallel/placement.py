"""Decode state on a mesh: slots and pages over "data", heads and vocabulary over "model".

Every group of devices along "data" runs the step on its own slots as if there were no others: a request that belongs to
another group has a slot number out of range here, and page numbers count from the group's own first page.

    data=2, 4 slots, 8 pages     group 0: slots 0 1, pages 0..3      group 1: slots 2 3 (here 0 1), pages 4..7 (0..3)
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from specinfer_jax.models.kv_cache import KVCache
from specinfer_jax.parallel.sharding import DATA, MODEL, RULES, WHOLE, splits
from specinfer_jax.speculation.state import DecodeState, StepProgram

Kind = Literal["whole", "state", "slots", "slot", "of slot"]
"""What an argument or a result is: the same everywhere; a `DecodeState`; arrays with a row per slot; a slot's number;
known to that slot's group."""


def state_specs(state: DecodeState, program: StepProgram, model: int) -> DecodeState:
    """How every array of a decode state lies on a mesh whose axis "model" has this size.

    Args:
      state: arrays or their shapes.
      program: whose state it is; its LLM's config is laid out for the mesh.
      model: devices along "model".
    """
    heads = "heads" if splits(program.llm, model, "heads") else None
    vocab = "vocab" if program.splits_vocab else None

    def spec(path: tuple[Any, ...], _: Any) -> PartitionSpec:
        names = [str(getattr(key, "name", "")) for key in path]
        if names[-1:] == [""]:
            names.pop()  # an entry of a tuple of pages
        if names[-1] in ("k_pages", "v_pages"):
            return RULES.spec(heads if names[0] == "cache" else None, "pages")
        if names[-1] in ("is_stop_BV", "bias_BV"):
            return RULES.spec("slots", vocab)
        return RULES.spec("slots")

    return jax.tree_util.tree_map_with_path(spec, state)


class MeshPrograms:
    """Compiles functions of a decode state for a mesh, so that what comes out lies as what went in."""

    def __init__(self, mesh: Mesh, program: StepProgram, state: DecodeState) -> None:
        """`state`: arrays or their shapes."""
        self.mesh = mesh
        self.groups = mesh.shape[DATA]
        """Groups of devices with slots of their own."""
        self._specs = state_specs(state, program, mesh.shape[MODEL])
        self.state_shardings = jax.tree.map(
            lambda spec: NamedSharding(mesh, spec), self._specs, is_leaf=lambda x: isinstance(x, PartitionSpec)
        )

    def jit(
        self, run: Callable[..., Any], *, inputs: Sequence[Kind], outputs: Kind | tuple[Kind, ...],
        donate: int | None = None,
    ) -> Any:  # fmt: skip
        """`jax.jit(run)` on the mesh.

        Args:
          run: takes positional arguments.
          inputs: what they are.
          outputs: what it returns.
          donate: position of a donated argument.
        """
        whole = NamedSharding(self.mesh, WHOLE)
        # Of several processes each one reads all rows.
        rows = whole if jax.process_count() > 1 else NamedSharding(self.mesh, RULES.spec("slots"))
        by_kind = {"state": self.state_shardings, "slots": rows}
        shardings = jax.tree.map(lambda kind: by_kind.get(kind, whole), outputs)
        compiled = jax.jit(
            self.on_mesh(run, inputs=inputs, outputs=outputs),
            out_shardings=shardings,
            donate_argnums=() if donate is None else donate,
        )
        return _OneAtATime(compiled) if self.mesh.devices.flat[0].platform == "cpu" else compiled

    def on_mesh(
        self, run: Callable[..., Any], *, inputs: Sequence[Kind], outputs: Kind | tuple[Kind, ...]
    ) -> Callable[..., Any]:
        """`run` as each group of devices does it; to be traced."""
        mesh = self.mesh.abstract_mesh
        specs = {
            "state": jax.tree.map(_only_data, self._specs, is_leaf=lambda x: isinstance(x, PartitionSpec)),
            "slots": RULES.spec("slots"),
        }

        def in_group(*arguments: Any) -> Any:
            num_slots = next(
                a.committed_B.shape[0] for a, kind in zip(arguments, inputs, strict=True) if kind == "state"
            )
            first = jax.lax.axis_index(DATA) * num_slots
            is_here = jnp.bool_(True)
            local: list[Any] = []
            for argument, kind in zip(arguments, inputs, strict=True):
                if kind == "slot":
                    is_here = (argument >= first) & (argument < first + num_slots)
                    local.append(jnp.where(is_here, argument - first, num_slots))
                else:
                    local.append(_move_pages(argument, -1) if kind == "state" else argument)
            results = run(*local)
            return jax.tree.map(
                lambda kind, result: _out(kind, result, is_here), outputs, results,
                is_leaf=lambda x: isinstance(x, str),
            )  # fmt: skip

        def traced(*arguments: Any) -> Any:
            with jax.sharding.use_abstract_mesh(mesh):
                if self.groups == 1:
                    return run(*arguments)
                return jax.shard_map(
                    in_group, mesh=mesh, axis_names={DATA},
                    in_specs=tuple(specs.get(kind, WHOLE) for kind in inputs),
                    out_specs=jax.tree.map(lambda kind: specs.get(kind, WHOLE), outputs),
                    check_vma=False,
                )(*arguments)  # fmt: skip

        return traced

    def new_state(self, make: Callable[[], DecodeState]) -> DecodeState:
        """An empty state, made where it belongs."""
        return jax.jit(make, out_shardings=self.state_shardings)()

    def fetch(self, tree: Any) -> Any:
        """Numpy arrays of what a call returned, on every process."""
        return jax.device_get(tree)


class _OneAtATime:
    """A compiled call that waits for its end: fake CPU devices share threads, and two programs whose devices wait for
    each other can take all of them."""

    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled

    def __call__(self, *arguments: Any) -> Any:
        return jax.block_until_ready(self._compiled(*arguments))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiled, name)


def _only_data(spec: PartitionSpec) -> PartitionSpec:
    return PartitionSpec(*(axis if axis == DATA else None for axis in spec))


def _out(kind: Kind, result: Any, is_here: Array) -> Any:
    if kind == "state":
        return _move_pages(result, 1)
    if kind == "of slot":  # zeros from the other groups
        return jax.tree.map(lambda x: jax.lax.psum(jnp.where(is_here, x, jnp.zeros_like(x)), DATA), result)
    return result


def _move_pages(state: DecodeState, sign: int) -> DecodeState:
    """Page numbers of all caches counted from the group's first page (-1), or from the first of all (1)."""

    def moved(leaf: Any) -> Any:
        if not isinstance(leaf, KVCache):
            return leaf
        first: Int[Array, ""] = jax.lax.axis_index(DATA) * leaf.k_pages[0].shape[1]
        return leaf._replace(block_table=leaf.block_table + sign * first)

    return jax.tree.map(moved, state, is_leaf=lambda x: isinstance(x, KVCache))
