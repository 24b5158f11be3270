"""ZeroMQ's CURVE: each connection is encrypted, and both ends know that the other one knows their secret.

Who listens has a key pair, and who connects must know its public key: without that ZeroMQ drops a stranger in the first
message of the handshake, before anything is decoded or kept. So the public key is as secret as the private one here. If
all ranks share a secret, both are made from it, and nobody has to be told.
"""

from __future__ import annotations

from hashlib import blake2b

import zmq
from zmq.utils import z85

from torchkv.errors import ProtocolError

__all__ = ["CurveKeys"]

_CHARACTERS = 40  # of a public key, in ZeroMQ's text form


class CurveKeys:
    """The keys of one channel. told: the public key, if peers have to be told it; else nothing.

    secret: from which to make the pair for listening; None: a random pair.
    """

    def __init__(self, secret: bytes | None) -> None:
        self._own = zmq.curve_keypair()  # for connecting
        self.told: tuple[str, ...] = ()
        if secret is None:
            self._public, self._private = zmq.curve_keypair()
            self.told = (self._public.decode(),)
        else:
            self._private = z85.encode(blake2b(key=secret, digest_size=32, person=b"torchkv-curve").digest())
            self._public = zmq.curve_public(self._private)

    def serve(self, socket: zmq.Socket[bytes]) -> None:
        """From now on only who knows the public key connects to ``socket``, which is about to listen."""
        socket.set(zmq.CURVE_SERVER, 1)
        socket.set(zmq.CURVE_PUBLICKEY, self._public)
        socket.set(zmq.CURVE_SECRETKEY, self._private)

    def visit(self, socket: zmq.Socket[bytes], key: str) -> None:
        """The next connection of ``socket`` is to who has this public ``key``, or to who shares the secret if empty.

        Raises ``ProtocolError`` for what is no key.
        """
        if key and (len(key) != _CHARACTERS or not key.isascii()):
            raise ProtocolError(f"an endpoint with a key of {len(key)} characters instead of {_CHARACTERS}")
        public, private = self._own
        socket.set(zmq.CURVE_PUBLICKEY, public)
        socket.set(zmq.CURVE_SECRETKEY, private)
        try:
            socket.set(zmq.CURVE_SERVERKEY, key.encode() or self._public)
        except zmq.ZMQError as error:
            raise ProtocolError(f"an endpoint whose key is no key of ZeroMQ's CURVE: {error}") from error
