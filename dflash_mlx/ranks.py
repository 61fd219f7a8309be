"""One model on several machines: which of the processes of `mlx.launch` this one is, and what rank 0 tells the others.

    mlx.launch -n 2 --backend ring -- dflash-mlx generate ...

Every rank runs the same program on its share of the target. What could differ between them is read on rank 0 alone: what a pass
has chosen, clocks, requests and cancels. `told` gives such a value to all of them, `first` does so to an array on the device.
Then the same code comes to the same ids, widths and caches everywhere.

    rank 0   | pass | reads: 3 accepted, 12.1 ms --told--> | pass | ...
    rank 1   | pass |                     the same  <----- | pass | ...

Messages go through a socket of their own, not through MLX: there they would wait for the passes that are under way. It also says
who is still there. Where a rank ends, MLX's collective operations wait for ever or fail; the socket ends at once.
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

# A sign of life each second; a machine that gave none for so long is lost. Where only the process died the system says so.
_BEAT_S, _SILENT_S = 1.0, 20.0
# Seconds until all ranks have called; seconds that a rank has to end by itself once rank 0 has.
_JOIN_S, _GRACE_S = 60.0, 3.0
_BEAT, _LEAVES = b"null", b"false"


class RanksError(DFlashError, RuntimeError):
    """Several ranks cannot run this together."""


@functools.cache
def join() -> Ranks | None:
    """The group of processes that `mlx.launch` started this one in; None: it is alone. A process is in one.

    Raises:
      RanksError: the others were not reached.
    """
    if "MLX_RANK" not in os.environ:
        return None
    import mlx.core as mx

    group = mx.distributed.init()
    return Ranks(group) if group.size() > 1 else None


def joined() -> Ranks | None:
    """What `join` has given already."""
    return join() if join.cache_info().currsize else None


class Ranks:
    """This process among the others. rank: which one it is; size: how many there are; group: as MLX's operations are told it.

    Not safe for two threads: what is told has an order.
    """

    def __init__(self, group: mx.distributed.Group):
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self._heard: queue.Queue[Any] = queue.Queue()
        self._sending, self._is_left = threading.Lock(), False
        # Set where this rank ends with an error that rank 0 has not got: then it does not take leave.
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

    def told(self, value: Any, what: str) -> Any:
        """Rank 0's value, on every rank: numbers, texts, None, and lists and dicts of them.

        what: names it; ranks that ask for different things have parted, which ends them.
        """
        if self.leads:
            self._send(json.dumps([what, value]).encode())
            return value
        named, value = self._heard.get()
        if named != what:
            # Nobody may catch this and go on.
            parted = f"Error: rank {self.rank} asks for {what} where rank 0 tells {named}"
            _end(f"{parted}. Give all ranks the same command and files.", 1)
        return value

    def told_of(self, make: Callable[[], Any], what: str) -> Any:
        """Rank 0's outcome of a call that the others need not make."""
        return self.told(make() if self.leads else None, what)

    def clock(self) -> float:
        """Rank 0's seconds."""
        return self.told(time.perf_counter(), "the time")

    def first(self, ids: mx.array) -> mx.array:
        """Rank 0's integers, in an array on every rank; not evaluated. All ranks make it from the same operations."""
        import mlx.core as mx

        # Not zeros that depend on nothing: that sum would not wait for this rank's pass, and messages would change places.
        return mx.distributed.all_sum(ids * int(self.leads), group=self.group)

    def sampler(self, sampler: Callable[[mx.array], mx.array] | None) -> Callable[[mx.array], mx.array]:
        """A sampler of mlx-lm's, or none for the likeliest token, that draws what rank 0's does."""
        import mlx.core as mx

        return lambda rows: self.first((sampler(rows) if sampler else mx.argmax(rows, axis=-1)).astype(mx.int32))

    def agree(self, values: dict[str, Any]) -> None:
        """Compare what every rank must have the same.

        Raises:
          RanksError: on the rank whose value is another one.
        """
        for name, mine in values.items():
            if (theirs := self.told(mine, name)) != mine:
                raise RanksError(f"{name} is {mine} on rank {self.rank} and {theirs} on rank 0", "Use the same on all machines")

    def leave(self) -> None:
        """Say that this rank ends, and is not lost. One that an error ends does not, unless it is rank 0, which has shown it."""
        if not self._is_left:
            self._is_left = True
            # Python keeps there what nobody caught, before it calls this at exit. Ctrl-C is no error.
            has_raised = not self.leads and issubclass(getattr(sys, "last_type", KeyboardInterrupt), Exception)
            if not (self.is_failed or has_raised):
                self._send(_LEAVES)

    def has_ended(self, within_s: float) -> bool:
        """Whether rank 0 takes leave within so many seconds."""
        return self._leader_left.wait(within_s)

    def _send(self, body: bytes) -> None:
        message = struct.pack(">I", len(body)) + body
        with self._sending:
            for peer in self._peers.values():
                try:
                    peer.sendall(message)
                except OSError:
                    # Whoever listens to it says that it is lost.
                    continue

    def _beat(self) -> None:
        while not self._is_left:
            self._send(_BEAT)
            time.sleep(_BEAT_S)

    def _listen(self, rank: int, peer: socket.socket) -> None:
        try:
            while (message := json.loads(_read(peer, struct.unpack(">I", _read(peer, 4))[0]))) is not False:
                if message is not None:
                    self._heard.put(message)
        except (OSError, ValueError) as error:
            if not self._is_left:
                how = f"gave no sign of life for {_SILENT_S:.0f} s" if isinstance(error, TimeoutError) else "has ended"
                _end(f"Error: rank {rank} {how}, and rank {self.rank} cannot go on without it. Start all ranks again.", 1)
            return
        self._leader_left.set()
        if not self.leads and not self._is_left:
            # Rank 0 ends when it is done; a rank that still computes then was interrupted with it.
            time.sleep(_GRACE_S)
            _end("", 0)


def _end(sentence: str, status: int) -> None:
    """End the process, whatever waits for MLX in it."""
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
    """A socket to each of the others on rank 0, to rank 0 on the others, by rank. Where, and a secret, go through MLX's group."""
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
            f"rank {ranks.rank} has no connection with the others at {where}: {error}",
            "Let the machines reach each other at the addresses of the hostfile",
        ) from None


def own_address() -> str:
    """Where the others reach rank 0: its first address in what `mlx.launch` has told this process."""
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
            peer = _quick(listener.accept()[0])
            try:
                hello = _read(peer, len(secret) + 4)
            except OSError:
                continue
            if secrets.compare_digest(hello[:-4], secret.encode()):
                found[struct.unpack(">I", hello[-4:])[0]] = peer
    return sorted(found.items())


def _call(place: dict[str, Any], rank: int) -> list[tuple[int, socket.socket]]:
    peer = _quick(socket.create_connection((place["host"], place["port"]), _JOIN_S))
    peer.sendall(place["secret"].encode() + struct.pack(">I", rank))
    return [(0, peer)]


def _quick(peer: socket.socket) -> socket.socket:
    peer.settimeout(_JOIN_S)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return peer
