"""Two processes on this machine: one decides, both compute, and a silent one is named."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tiny_model import write_folder

from specinfer_jax.parallel import multihost
from specinfer_jax.parallel.multihost import Cluster, decode, encode
from specinfer_jax.serving.request import EngineRequest, admission
from specinfer_jax.speculation.sampling import SamplingState
from specinfer_jax.speculation.slots import Admission

WORKER = Path(__file__).with_name("multihost_worker.py")


def start(folder: Path, mesh: str, mode: str) -> list[subprocess.Popen[str]]:
    write_folder(folder)
    write_folder(Path(f"{folder}-ssm"), seed=1)
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {
        "PYTHONPATH": str(WORKER.parent.parent), "SPECINFER_CACHE": str(folder.parent / "cache"),
    }  # fmt: skip
    return [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(folder), mesh, f"localhost:{port}", str(p), "2", mode],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )
        for p in range(2)
    ]  # fmt: skip


@pytest.mark.parametrize("mesh", ["data=1,model=4", pytest.param("data=2,model=2", marks=pytest.mark.slow)])
def test_both_processes_accept_the_same(tmp_path: Path, mesh: str) -> None:
    # case B043
    processes = start(tmp_path / "m", mesh, "once")
    ended = [process.communicate(timeout=400) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], ended
    (ids, counts), (others,) = ([json.loads(line) for line in out.splitlines() if line[0] == "{"] for out, _ in ended)
    assert counts["counts"] == others["counts"] and len(counts["counts"]) > 5
    assert all(ids["ids"])


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
def test_a_silent_process_is_named(tmp_path: Path, how: signal.Signals) -> None:
    # case B044
    first, second = processes = start(tmp_path / "m", "data=1,model=4", "for ever")
    try:
        assert first.stdout is not None
        assert any(line == "READY\n" for line in first.stdout), "process 0 never got ready"  # gloo writes lines, too
        time.sleep(1)
        began = time.monotonic()
        second.send_signal(how)
        _, errors = first.communicate(timeout=60)
        seconds = time.monotonic() - began
        assert first.returncode == multihost.EXIT_CODE, errors
        assert "specinfer: process 1 (" in errors and "process 0 ends" in errors
        assert seconds <= 30
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@contextlib.contextmanager
def pair(silence: float) -> Iterator[tuple[Cluster, Cluster]]:
    """Process 0 and process 1, in one."""
    ends = socket.socketpair()
    clusters = [
        Cluster(process, [multihost._Peer(f"process {1 - process} (test)", end)], silence=silence)
        for process, end in enumerate(ends)
    ]
    try:
        yield clusters[0], clusters[1]
    finally:
        for cluster in clusters:
            cluster.close()
        for end in ends:
            end.shutdown(socket.SHUT_RDWR)
            end.close()


def test_calls_arrive_in_order_and_end() -> None:
    with pair(60.0) as (leader, follower):
        leader.tell("steps", 4)
        leader.tell("hand_out", [[1, 2], None])
        leader.close()
        assert list(follower.calls({})) == [("steps", [4]), ("hand_out", [[[1, 2], None]])]


def test_a_closed_cluster_leaves_no_thread_behind() -> None:
    others = set(threading.enumerate())
    with pair(60.0):
        own = set(threading.enumerate()) - others
    assert len(own) == 4
    for thread in own:
        thread.join(10)
    assert not any(thread.is_alive() for thread in own)


@pytest.mark.parametrize("stuck", [False, True])
def test_a_process_that_lives_but_does_not_begin_is_named(monkeypatch: pytest.MonkeyPatch, stuck: bool) -> None:
    reasons: list[str] = []
    monkeypatch.setattr(Cluster, "_stop", lambda self, reason, told=False: reasons.append(reason))
    with pair(3.0) as (leader, follower):
        leader.ready()
        leader.tell("steps", 1)
        if not stuck:
            next(iter(follower.calls({})))
        end = time.monotonic() + (9 if stuck else 6)
        while time.monotonic() < end and not reasons:
            time.sleep(0.1)
    if stuck:
        assert "process 1 (test) lives but is stuck before call 1 of 1" in reasons[0]
    else:
        assert not reasons


def test_an_admission_survives_the_wire() -> None:
    request = EngineRequest([3, 1, 2], 5, frozenset({4}), seed=2**63 + 5)
    sent = admission(request, max_model_len=16, vocab_size=8)
    types = {"Admission": Admission, "SamplingState": SamplingState}
    got = decode(json.loads(json.dumps(encode(sent))), types)
    assert isinstance(got, Admission) and isinstance(got.sampling, SamplingState)
    assert got.committed is None
    for x, y in zip(got.sampling, sent.sampling, strict=True):
        assert x.dtype == y.dtype and np.array_equal(x, y)
    assert got.token_S.tolist() == sent.token_S.tolist() and got.limit == sent.limit


def test_only_known_types_are_made() -> None:
    with pytest.raises(KeyError):
        decode({"type": "Popen", "values": []}, {})
