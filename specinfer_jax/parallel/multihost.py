"""Several processes, one engine: process 0 decides, the others make the same calls, and who falls silent is named.

    process 0    LLM.generate -> scheduler -> call 7: steps(4) --+--> device program  (all processes together)
    process 1    ............................ call 7: steps(4) <-+--> device program

Every call of `Device` goes out over a connection of its own beside jax.distributed, numbered and with its arguments,
so batches, shapes and random seeds have one source. Each process tells once a second that it lives and how far it is.
One that is silent, or that has not begun a call for too long although it lives, is named on all of them, and they end:
a program that waits for it inside a collective could not.
"""

import base64
import dataclasses
import json
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import jax
import numpy as np

from specinfer_jax.errors import ConfigError

EXIT_CODE = 3
"""Of processes that end because another one is gone."""
_PULSE = 1.0
"""Seconds between signs of life."""
SILENCE = 15.0
"""Seconds without one after which a process counts as dead."""
_CONNECT = 120.0
"""Seconds in which all processes must have started."""


@dataclasses.dataclass
class _Peer:
    """The other end of a connection."""

    name: str
    stream: socket.socket
    lock: Any = dataclasses.field(default_factory=threading.Lock)
    heard: float = dataclasses.field(default_factory=time.monotonic)
    begun: int = 0
    behind_since: float | None = None
    has_ended: bool = False

    def send(self, message: Mapping[str, Any]) -> None:
        """One message; a peer that is gone is found by its silence."""
        data = json.dumps(message).encode()
        try:
            with self.lock:
                self.stream.sendall(len(data).to_bytes(4, "big") + data)
        except OSError:
            return

    def messages(self) -> Iterator[dict[str, Any]]:
        """What comes in, until the connection closes."""
        reader = self.stream.makefile("rb")
        try:
            while len(size := reader.read(4)) == 4:
                data = reader.read(int.from_bytes(size, "big"))
                self.heard = time.monotonic()
                yield json.loads(data)
        except (OSError, ValueError):
            return
        finally:
            reader.close()


class Cluster:
    """This process's connections: to all others in process 0, to process 0 elsewhere."""

    def __init__(self, process: int, peers: Sequence[_Peer], *, silence: float = SILENCE) -> None:
        self.process, self._peers, self._silence = process, peers, silence
        self._sent = self._begun = 0
        self._watches_progress = False
        self._calls: queue.Queue[dict[str, Any] | None] = queue.Queue()
        for peer in peers:
            threading.Thread(target=self._listen, args=(peer,), daemon=True).start()
        threading.Thread(target=self._watch, daemon=True).start()

    @property
    def is_leader(self) -> bool:
        """Process 0, which decides."""
        return self.process == 0

    def tell(self, name: str, *arguments: Any) -> None:
        """Have all others make a call; before this process makes it."""
        self._sent += 1
        message = {"call": name, "arguments": encode(arguments), "number": self._sent}
        for peer in self._peers:
            peer.send(message)

    def ready(self) -> None:
        """Nothing compiles any more: from now on a process that lags behind is stuck."""
        self._watches_progress = True

    def calls(self, types: Mapping[str, type]) -> Iterator[tuple[str, Sequence[Any]]]:
        """What process 0 tells, until it ends; `types`: named tuples among the arguments."""
        while (message := self._calls.get()) is not None:
            self._begun = message["number"]
            yield message["call"], decode(message["arguments"], types)

    def close(self) -> None:
        """The others may end."""
        for peer in self._peers:
            peer.send({"end": True})
            peer.has_ended = True

    def _listen(self, peer: _Peer) -> None:
        for message in peer.messages():
            if "stop" in message:
                self._stop(message["stop"], told=True)
            elif "end" in message:
                peer.has_ended = True
                self._calls.put(None)
            elif "call" in message:
                self._calls.put(message)
            elif "begun" in message:
                peer.begun = message["begun"]
        if not peer.has_ended:
            # A process that dies closes its connections at once; one that ends says so first.
            self._stop(f"{peer.name} is gone: its connection closed")

    def _watch(self) -> None:
        last = time.monotonic()
        while not all(peer.has_ended for peer in self._peers):
            time.sleep(_PULSE)
            now = time.monotonic()
            if now - last > self._silence / 2:  # this process itself was stopped; whom it missed is not known yet
                for peer in self._peers:
                    peer.heard = now
            last = now
            for peer in self._peers:
                peer.send({"begun": self._begun})
                if peer.has_ended:
                    continue
                if now - peer.heard > self._silence:
                    self._stop(f"{peer.name} has given no sign of life for {now - peer.heard:.0f} s")
                if self.is_leader and self._watches_progress:
                    lags = peer.begun < self._sent
                    peer.behind_since = (peer.behind_since or now) if lags else None
                    if peer.behind_since is not None and now - peer.behind_since > self._silence:
                        self._stop(f"{peer.name} lives but is stuck before call {peer.begun + 1} of {self._sent}")

    def _stop(self, reason: str, *, told: bool = False) -> NoReturn:
        """End this process, wherever it waits; the others hear why."""
        if not told:
            for peer in self._peers:
                peer.send({"stop": reason})
        print(f"specinfer: {reason}; process {self.process} ends", file=sys.stderr, flush=True)
        os._exit(EXIT_CODE)


_cluster: list[Cluster] = []
"""This process's, once there is one; like jax.distributed's, it lasts as long as the process."""


def cluster() -> Cluster | None:
    """What `initialize` made; None in a process that is alone."""
    return _cluster[0] if _cluster else None


def initialize(
    coordinator: str | None = None, num_processes: int | None = None, process_id: int | None = None, *,
    control_port: int | None = None, silence: float = SILENCE,
) -> None:  # fmt: skip
    """Join the other processes; before anything else touches a device, and once.

    Args:
      coordinator: "host:port" of process 0; None where jax finds all three itself (TPU pod slices, Slurm).
      num_processes: how many there are.
      process_id: which one this is.
      control_port: of process 0, for this module's connections; None: the coordinator's port + 1.
      silence: seconds after which a process counts as dead or stuck.

    Raises:
      ConfigError: this process has joined already, no coordinator is known, or not all have started in time.
    """
    if _cluster:
        raise ConfigError("this process has joined the others already")
    jax.distributed.initialize(coordinator, num_processes, process_id)
    process, count = jax.process_index(), jax.process_count()
    if count == 1:
        return
    coordinator = coordinator or os.environ.get("SPECINFER_COORDINATOR")
    host, _, port = (coordinator or "").rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError('set coordinator (or SPECINFER_COORDINATOR) to "host:port" of process 0')
    address = (host, control_port or int(port) + 1)
    peers = _accept(address[1], count) if process == 0 else [_connect(address, process)]
    _cluster.append(Cluster(process, peers, silence=silence))


def _accept(port: int, count: int) -> list[_Peer]:
    with socket.create_server(("", port)) as server:
        server.settimeout(_CONNECT)
        peers: list[_Peer] = []
        try:
            while len(peers) < count - 1:
                stream, (host, *_) = server.accept()
                size = int.from_bytes(stream.recv(4, socket.MSG_WAITALL), "big")
                hello = json.loads(stream.recv(size, socket.MSG_WAITALL))
                peers.append(_Peer(f"process {hello['hello']} ({hello['host']}, {host})", stream))
        except TimeoutError:
            raise ConfigError(f"{len(peers) + 1} of {count} processes have started within {_CONNECT:.0f} s") from None
        return peers


def _connect(address: tuple[str, int], process: int) -> _Peer:
    end = time.monotonic() + _CONNECT
    while True:
        try:
            stream = socket.create_connection(address, timeout=5)
            break
        except OSError as error:
            if time.monotonic() > end:
                raise ConfigError(f"process 0 does not answer at {address[0]}:{address[1]}: {error}") from None
            time.sleep(0.2)
    stream.settimeout(None)
    peer = _Peer(f"process 0 ({address[0]})", stream)
    peer.send({"hello": process, "host": socket.gethostname()})
    return peer


def encode(value: Any) -> Any:
    """Arguments as JSON: numbers, lists, None, arrays, and named tuples by their class's name."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {"type": type(value).__name__, "values": [encode(entry) for entry in value]}
    if isinstance(value, list | tuple):
        return [encode(entry) for entry in value]
    if isinstance(value, np.ndarray | np.generic):
        data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return {"dtype": value.dtype.name, "shape": list(value.shape), "data": data}
    return value


def decode(value: Any, types: Mapping[str, type]) -> Any:
    """The inverse of `encode`; sequences come back as lists, and only the named tuples in `types` are made."""
    if isinstance(value, list):
        return [decode(entry, types) for entry in value]
    if isinstance(value, dict) and "type" in value:
        return types[value["type"]](*decode(value["values"], types))
    if isinstance(value, dict):
        flat = np.frombuffer(base64.b64decode(value["data"]), value["dtype"])
        return flat.reshape(value["shape"])
    return value
