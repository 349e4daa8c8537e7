"""Tables as rows: Parquet, CSV, TSV, JSON lines and plain lists."""

from typing import Any

from wdsprep.dataset.rejects import RejectedError

TableRow = dict[str, Any] | RejectedError
