"""How tokens, blocks and namespaces are named in a log, and packed into text.

Decisions depend on which tokens are equal, not on their ids. So a log may rename them by a secret permutation of all
2**32 ids, drawn for that log and stored nowhere: the log replays to the same decisions, and nobody can look the text up
in the model's vocabulary. That is not encryption: guessed prompt structures and token frequencies reveal something.
Block hashes and namespaces also only need to be equal or not. They are always hashed again: a namespace contains the
client's cache salt, and an engine's block hash is a fingerprint of text.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import zlib

import numpy as np
from numpy.typing import NDArray

from preble.core.types import TOKEN_BYTES, BlockHash, PackedTokens

KEY_BYTES = 32
MAX_PROMPT_BYTES = 256 * 1024 * 1024
"""The most bytes of one unpacked prompt; a longer one means a damaged or hostile log."""
_ROUNDS = 4
_HALF = 1 << 16


class LogNames:
    """The names of one log. Pure; the same key gives the same names.

    `key`: 32 secret bytes to rename tokens by; None leaves token ids as they are.
    """

    def __init__(self, key: bytes | None = None) -> None:
        self._key = key or b""
        self._tables = [_table(key, i) for i in range(_ROUNDS)] if key else []

    @property
    def renames_tokens(self) -> bool:
        return bool(self._tables)

    def tokens(self, packed: bytes) -> str:
        """Return packed token ids as text: renamed, little-endian, compressed, base64. O(n)."""
        ids = np.frombuffer(packed, np.uint32)
        renamed = self._permuted(ids) if self._tables else ids
        return base64.b64encode(zlib.compress(renamed.astype("<u4", copy=False).tobytes(), 1)).decode()

    def _permuted(self, ids: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """Apply a Feistel network to the two halves of each id: a bijection for any tables."""
        left, right = (ids >> 16).astype(np.uint16), (ids & 0xFFFF).astype(np.uint16)
        for table in self._tables:
            left, right = right, left ^ table[right]
        return (left.astype(np.uint32) << np.uint32(16)) | right.astype(np.uint32)

    def block(self, block_hash: BlockHash) -> int:
        """Return a block's name, 63 bits: equal for equal blocks (and for one in 10**19 other pairs)."""
        raw = block_hash if isinstance(block_hash, bytes) else b"%d" % block_hash
        digest = hashlib.blake2b(raw, digest_size=8, key=self._key, person=b"block").digest()
        return int.from_bytes(digest, "little") >> 1

    def namespace(self, namespace: str) -> str:
        """Return a namespace's name; "" for the common one."""
        if not namespace:
            return ""
        return hashlib.blake2b(namespace.encode(), digest_size=16, key=self._key, person=b"namespace").hexdigest()


def _table(key: bytes, number: int) -> NDArray[np.uint16]:
    stream = hashlib.shake_256(key + bytes([number])).digest(2 * _HALF)
    return np.frombuffer(stream, "<u2").astype(np.uint16)


def unpack_text(text: str) -> PackedTokens:
    """Return the packed token ids in a text of `LogNames.tokens`, under the log's names.

    Raises: ValueError: it is not such a text.

    >>> from preble.core.types import pack_tokens
    >>> unpack_text(LogNames().tokens(pack_tokens([1, 2, 3]))) == pack_tokens([1, 2, 3])
    True
    """
    inflate = zlib.decompressobj()
    try:
        raw = inflate.decompress(base64.b64decode(text, validate=True), MAX_PROMPT_BYTES)
    except (binascii.Error, zlib.error) as error:
        raise ValueError(f"the token ids are unreadable: {error}") from error
    if not inflate.eof or len(raw) % TOKEN_BYTES:
        raise ValueError("the token ids are cut off, or longer than any prompt")
    return PackedTokens(np.frombuffer(raw, "<u4").astype(np.uint32).tobytes())
