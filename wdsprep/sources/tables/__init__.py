"""Tables as rows: Parquet, CSV, TSV, JSON lines, plain lists, Arrow and MDS."""

from typing import Any, NamedTuple

from wdsprep.dataset.rejects import RejectedError

TableRow = dict[str, Any] | RejectedError


class RawArray(NamedTuple):
    """An array in a table, whose values lie in `data` row by row, little-endian.

    `dtype` is NumPy's name, or bfloat16. Without a dtype or a shape, nobody has said what the
    bytes are.
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes
