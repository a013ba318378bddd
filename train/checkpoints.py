"""Checkpoints of a run: orbax, written in the background, whole or not there, the newest good one found again.

What is saved is copied to the host first: the step donates the state, so its arrays are overwritten while the file is
still being written. Copies also make a checkpoint independent of how many devices there were.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from specinfer_jax.checkpoint.disk import check_free_space, full_disk, is_full
from specinfer_jax.errors import CheckpointError

FOLDER = "checkpoints"


class Restored(NamedTuple):
    """A checkpoint that was read."""

    step: int
    """Batches applied."""
    tree: Any
    """Its arrays, as numpy arrays in the template's structure."""


class Checkpoints:
    """The checkpoints of one run; a context whose end waits for the last one to be on disk."""

    def __init__(self, folder: Path, *, keep: int, read_only: bool = False) -> None:
        """Open or make `folder`; what a killed run left unfinished is removed.

        Args:
          folder: the run's folder; checkpoints are in a folder of their own in it.
          keep: how many of the newest are kept.
          read_only: nothing is made or removed.
        """
        logging.getLogger("absl").setLevel(logging.ERROR)  # orbax tells of every file
        self.folder = folder.absolute() / FOLDER
        self.keep = keep
        options = ocp.CheckpointManagerOptions(
            max_to_keep=None if read_only else keep,
            create=not read_only,
            cleanup_tmp_directories=not read_only,
            read_only=read_only,
            enable_async_checkpointing=not read_only,
        )
        self._manager = ocp.CheckpointManager(
            self.folder, options=options, item_handlers=ocp.PyTreeCheckpointHandler()
        )  # fmt: skip

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._guarded(self._manager.wait_until_finished)
        finally:
            self._manager.close()

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending; not to be asked for while one is being written."""
        return sorted(self._manager.all_steps(read=True))

    def save(self, step: int, tree: Any) -> None:
        """Begin to write a checkpoint, once the one before it is written; returns when the arrays may be overwritten.

        Raises:
          CheckpointError: the disk is full, or this or the last checkpoint could not be written.
        """
        self._guarded(self._manager.wait_until_finished)
        if step in self.steps():
            return
        host = jax.tree.map(lambda leaf: np.array(leaf, copy=True), jax.device_get(tree))
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(host))
        check_free_space(self.folder, size)
        saved = self._guarded(lambda: self._manager.save(step, args=ocp.args.PyTreeSave(host), force=True))
        if not saved:
            raise CheckpointError(f"checkpoint {step} of {self.folder} was not written: orbax refused it")

    def restore(self, template: Any, *, step: int | None = None, say: Callable[[str], None] = print) -> Restored | None:
        """The newest checkpoint that can be read, or that of one step.

        Args:
          template: arrays or shapes in the structure that was saved.
          step: which one; None: the newest, and where it is damaged, the one before it.
          say: told about damaged ones.

        Returns:
          What was read; None if there is no checkpoint yet.

        Raises:
          CheckpointError: there is none for `step`, all are damaged, or they belong to another model.
        """
        there = self.steps()
        if step is not None and step not in there:
            raise CheckpointError(f"{self.folder} holds no checkpoint {step}; there are {there or 'none'}")
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), template)
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), shapes)
        arguments = ocp.args.PyTreeRestore(item=shapes, restore_args=as_numpy)
        for candidate in reversed(there) if step is None else [step]:
            try:
                tree = self._manager.restore(candidate, args=arguments)
            except Exception as error:  # orbax and tensorstore raise many kinds
                say(f"checkpoint {candidate} in {self.folder} cannot be read ({type(error).__name__}); it is left out")
                continue
            self._check(tree, shapes, candidate)
            for damaged in [other for other in there if other > candidate and step is None]:
                self._manager.delete(damaged)  # or the run could not save that step again
            return Restored(candidate, tree)
        if there:
            raise CheckpointError(f"{self.folder}: no checkpoint can be read; remove the folder to begin anew")
        return None

    def _check(self, tree: Any, shapes: Any, step: int) -> None:
        """Orbax reads arrays of other shapes without a word."""
        found, wanted = jax.tree.leaves_with_path(tree), jax.tree.leaves(shapes)
        for (path, leaf), shape in zip(found, wanted, strict=True):
            if leaf.shape != shape.shape or leaf.dtype != shape.dtype:
                raise CheckpointError(
                    f"checkpoint {step} in {self.folder} belongs to another model: {jax.tree_util.keystr(path)} is "
                    f"{leaf.dtype}{list(leaf.shape)} instead of {shape.dtype}{list(shape.shape)}"
                )

    def _guarded(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except CheckpointError:
            raise
        except Exception as error:  # tensorstore reports a full disk as a ValueError
            if is_full(error) or "No space left on device" in str(error):
                raise full_disk(self.folder) from None
            raise CheckpointError(f"a checkpoint could not be written to {self.folder}: {error}") from error
