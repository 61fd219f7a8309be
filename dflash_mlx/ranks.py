"""One model on several machines: the processes that `mlx.launch` starts (ranks), and what rank 0 broadcasts to the others.

    mlx.launch -n 2 --backend ring -- dflash-mlx generate ...

Every rank runs the same program on its share of the target. Only rank 0 reads what could differ between machines: the tokens that
a pass chose, clocks, requests and cancellations. `broadcast` sends such a value to every rank; `broadcast_array` does it for an
array on the device. So the same code reaches the same ids, widths and caches on every rank.

    rank 0   | pass | reads: 3 accepted, 12.1 ms --broadcast--> | pass | ...
    rank 1   | pass |          receives the same  <------------ | pass | ...

Messages use sockets, not MLX's collective operations: those would wait for the passes that are running. The sockets also show
which ranks are alive. When a rank dies, MLX's operations fail or wait for ever; its socket closes at once.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import queue
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .errors import DFlashError

if TYPE_CHECKING:
    import mlx.core as mx

# Seconds between heartbeats; seconds of silence after which a rank is lost. The socket of a process that died closes at once.
_BEAT_S, _SILENT_S = 1.0, 20.0
# Seconds in which all ranks must connect; seconds that a rank has to end by itself after rank 0 has ended.
_JOIN_S, _GRACE_S = 60.0, 3.0
# Messages: a heartbeat, and "this rank ends regularly". Every other message is a value.
_BEAT, _LEAVES = b"null", b"false"


class RanksError(DFlashError, RuntimeError):
    """The ranks cannot run this together."""


@functools.cache
def join() -> Ranks | None:
    """The ranks that `mlx.launch` started, this process among them; None if it runs alone. Made once per process.

    Raises:
      RanksError: the other ranks cannot be reached.
    """
    if "MLX_RANK" not in os.environ:
        return None
    import mlx.core as mx

    group = mx.distributed.init()
    return Ranks(group) if group.size() > 1 else None


def joined() -> Ranks | None:
    """What `join` returned, if it was called; else None."""
    return join() if join.cache_info().currsize else None


class Ranks:
    """The ranks of a run, seen from this one. rank: this rank's number; size: how many there are; group: MLX's own object.

    For one thread only: all ranks must broadcast in the same order.
    """

    def __init__(self, group: mx.distributed.Group):
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self._received: queue.Queue[Any] = queue.Queue()
        self._sending, self._is_left = threading.Lock(), False
        # Set if this rank ends with an error that rank 0 does not have. It then sends no farewell, so the others end too.
        self.is_failed = False
        self._leader_left = threading.Event()
        self._peers = dict(_connect(self))
        for rank, peer in self._peers.items():
            peer.settimeout(_SILENT_S)
            threading.Thread(target=self._listen, args=(rank, peer), name=f"rank {rank}", daemon=True).start()
        threading.Thread(target=self._beat, name="beat", daemon=True).start()
        atexit.register(self.leave)

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def broadcast(self, value: Any, what: str) -> Any:
        """Rank 0's value, on every rank. It must be JSON: numbers, strings, None, and lists and dicts of these.

        what: names the value. If ranks wait for different values, they are out of step, and the process ends.
        """
        if self.leads:
            self._send(json.dumps([what, value]).encode())
            return value
        named, value = self._received.get()
        if named != what:
            # Not an exception: a caller that caught it and went on would use another value as this one.
            parted = f"Error: rank {self.rank} waits for {what} and rank 0 sent {named}"
            _end(f"{parted}. Give all ranks the same command and files.", 1)
        return value

    def run_on_rank_0(self, make: Callable[[], Any], what: str) -> Any:
        """Call a function on rank 0 only, and return its result on every rank."""
        return self.broadcast(make() if self.leads else None, what)

    def clock(self) -> float:
        """`time.perf_counter` of rank 0."""
        return self.broadcast(time.perf_counter(), "the time")

    def broadcast_array(self, ids: mx.array) -> mx.array:
        """Rank 0's integers, in a lazy array on every rank. All ranks must compute `ids` with the same operations."""
        import mlx.core as mx

        # `ids * 0`, not plain zeros: a sum that does not depend on this rank's pass could run before the pass's own messages.
        return mx.distributed.all_sum(ids * int(self.leads), group=self.group)

    def sampler(self, sampler: Callable[[mx.array], mx.array] | None) -> Callable[[mx.array], mx.array]:
        """A sampler for mlx-lm's loop that draws the same tokens on every rank as on rank 0. None: greedy."""
        import mlx.core as mx

        return lambda rows: self.broadcast_array((sampler(rows) if sampler else mx.argmax(rows, axis=-1)).astype(mx.int32))

    def agree(self, values: dict[str, Any]) -> None:
        """Check values that must be equal on all ranks. values: by the name that the error shows.

        Raises:
          RanksError: on each rank whose value differs from rank 0's.
        """
        for name, mine in values.items():
            if (theirs := self.broadcast(mine, name)) != mine:
                raise RanksError(f"{name} is {mine} on rank {self.rank} and {theirs} on rank 0", "Use the same on all machines")

    def leave(self) -> None:
        """Tell the others that this rank ends regularly. After an error only rank 0 does: it has shown the error."""
        if not self._is_left:
            self._is_left = True
            # This runs at exit. An uncaught exception is then in sys.last_type. Ctrl-C is no error.
            has_raised = not self.leads and issubclass(getattr(sys, "last_type", KeyboardInterrupt), Exception)
            if not (self.is_failed or has_raised):
                self._send(_LEAVES)

    def has_ended(self, within_s: float) -> bool:
        """Wait at most `within_s` seconds for rank 0 to end regularly. Returns: whether it did."""
        return self._leader_left.wait(within_s)

    def _send(self, body: bytes) -> None:
        message = struct.pack(">I", len(body)) + body
        with self._sending:
            for peer in self._peers.values():
                try:
                    peer.sendall(message)
                except OSError:
                    # The thread that listens to this peer reports that it is lost.
                    continue

    def _beat(self) -> None:
        while not self._is_left:
            self._send(_BEAT)
            time.sleep(_BEAT_S)

    def _listen(self, rank: int, peer: socket.socket) -> None:
        try:
            while (message := json.loads(_read(peer, struct.unpack(">I", _read(peer, 4))[0]))) is not False:
                if message is not None:
                    self._received.put(message)
        except (OSError, ValueError) as error:
            if not self._is_left:
                how = f"gave no sign of life for {_SILENT_S:.0f} s" if isinstance(error, TimeoutError) else "has ended"
                _end(f"Error: rank {rank} {how}, and rank {self.rank} cannot go on without it. Start all ranks again.", 1)
            return
        self._leader_left.set()
        if not self.leads and not self._is_left:
            # Rank 0 has ended. If this rank still computes after a while, rank 0 was interrupted: end too.
            time.sleep(_GRACE_S)
            _end("", 0)


def _end(sentence: str, status: int) -> None:
    """End the process at once, even if a thread waits for MLX."""
    if sentence:
        sys.__stderr__.write(f"{sentence}\n")
        sys.__stderr__.flush()
    os._exit(status)


def _read(peer: socket.socket, n: int) -> bytes:
    parts = b""
    while len(parts) < n:
        part = peer.recv(n - len(parts))
        if not part:
            raise ConnectionError
        parts += part
    return parts


def _connect(ranks: Ranks) -> list[tuple[int, socket.socket]]:
    """Open sockets between rank 0 and every other rank. Rank 0's address and a secret go through MLX's group.

    Returns: (rank, socket) of each rank that this one talks to.
    """
    import mlx.core as mx

    listener, place = None, {}
    if ranks.leads:
        host = own_address()
        listener = socket.create_server((host, 0))
        place = {"host": host, "port": listener.getsockname()[1], "secret": secrets.token_hex(16)}
    text = json.dumps(place).encode().ljust(256)
    sent = mx.array(list(text), dtype=mx.int32)
    place = json.loads(bytes(mx.distributed.all_sum(sent * int(ranks.leads), group=ranks.group).tolist()))
    try:
        return _accept(listener, place["secret"], ranks.size) if listener else _call(place, ranks.rank)
    except OSError as error:
        where = f"{place['host']}, port {place['port']}"
        raise RanksError(
            f"rank {ranks.rank} has no connection with the other ranks at {where}: {error}",
            "Check that the machines reach each other at the addresses in the hostfile",
        ) from None


def own_address() -> str:
    """The address at which other ranks reach rank 0: the first one that `mlx.launch` gave this process."""
    if coordinator := os.environ.get("MLX_JACCL_COORDINATOR"):
        return coordinator.rpartition(":")[0]
    try:
        with open(os.environ.get("MLX_HOSTFILE", "")) as file:
            return json.load(file)[0][0].rpartition(":")[0]
    except (OSError, ValueError, LookupError):
        return os.environ.get("NCCL_HOST_IP") or socket.gethostbyname(socket.gethostname())


def _accept(listener: socket.socket, secret: str, size: int) -> list[tuple[int, socket.socket]]:
    found: dict[int, socket.socket] = {}
    with listener:
        listener.settimeout(_JOIN_S)
        while len(found) < size - 1:
            peer = _configured(listener.accept()[0])
            try:
                hello = _read(peer, len(secret) + 4)
            except OSError:
                continue
            if secrets.compare_digest(hello[:-4], secret.encode()):
                found[struct.unpack(">I", hello[-4:])[0]] = peer
    return sorted(found.items())


def _call(place: dict[str, Any], rank: int) -> list[tuple[int, socket.socket]]:
    peer = _configured(socket.create_connection((place["host"], place["port"]), _JOIN_S))
    peer.sendall(place["secret"].encode() + struct.pack(">I", rank))
    return [(0, peer)]


def _configured(peer: socket.socket) -> socket.socket:
    """Set a timeout, and send small messages without delay."""
    peer.settimeout(_JOIN_S)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return peer
