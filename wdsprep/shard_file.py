"""A tar of a dataset while it is written, and its index beside it."""

from collections.abc import Sequence
from contextlib import ExitStack

from wdsprep.manifest import Shard
from wdsprep.store import Store, write_bytes
from wdsprep.tar.write import TarWriter


class ShardFile:
    """Belongs to the stack, which drops what was not finished."""

    def __init__(self, store: Store, name: str, stack: ExitStack) -> None:
        self._store, self._name = store, name
        self._stack = stack.enter_context(ExitStack())  # closes the tar's thread, then the file
        sink = self._stack.enter_context(store.write(name))
        self._writer = self._stack.enter_context(TarWriter(sink))

    @property
    def samples(self) -> int:
        return self._writer.samples

    @property
    def nbytes(self) -> int:
        return self._writer.nbytes

    def add(self, key: str, fields: Sequence[tuple[str, bytes]]) -> None:
        self._writer.add(key, fields)

    def finish(self) -> Shard:
        """Complete the tar, then its index."""
        written = self._writer.finish()
        self._stack.close()
        write_bytes(self._store, f"{self._name}.idx", written.index)
        return Shard(
            name=self._name,
            samples=written.samples,
            nbytes=written.nbytes,
            sha256=written.sha256,
        )
