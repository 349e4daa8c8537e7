"""Calls of the public functions as a type checker sees them: right ones, and wrong ones that it has
to refuse. `mypy` reads this file with the package, and finds an `ignore` that nothing needs; nobody
runs it.
"""

from functools import partial
from pathlib import Path

import wdsprep


def right() -> None:
    wdsprep.pack("a", "b", min_size=3, buckets=(256, 512), max_shard_size="1GB", workers="4:32")
    wdsprep.pack(Path("a"), images=Path("b"), save_additional_columns=["a"], workers=(4, 32))
    partial(wdsprep.pack, "a", min_size=3)()
    _ = wdsprep.encode("a", resolution=256).samples
    _ = wdsprep.encode("a", resolution=(256, 512), captions="b")[0].samples
    wdsprep.verify("a", Path("b"), quick=True)
    wdsprep.verify(*["a", "b"], workers=2)
    how = wdsprep.Encode(resolution=64, batch_size="auto")
    wdsprep.load("a", global_batch=8, where="a > 1", fields=("latent", "key"), device="cpu")
    wdsprep.load([wdsprep.Stream("a", weight=1), "b"], global_batch=8, captions={"a": 1.0})
    wdsprep.stream("a", global_batch=2, encode=how)
    wdsprep.remove("a", keys=["k"], yes=True)
    wdsprep.select(["a", "b"], "c", split={"train": 0.9})
    wdsprep.export("a", "b", to="mds", join=["c"])
    _ = wdsprep.inspect("a").manifest
    wdsprep.duplicates("a", distance=3, output="b")
    wdsprep.card("a", repo="owner/name")
    wdsprep.report("a", output="b.html")
    wdsprep.repair("a", yes=True)
    wdsprep.import_("a", "b", resolution=64)


def wrong() -> None:
    wdsprep.pack("a", min_sise=3)  # type: ignore[call-arg]
    wdsprep.pack("a", min_size="3")  # type: ignore[arg-type]
    wdsprep.pack("a", "b", "c")  # type: ignore[call-arg, arg-type]
    wdsprep.encode("a", resolutions=256)  # type: ignore[call-overload]
    wdsprep.encode("a", resolution="256")  # type: ignore[arg-type]
    wdsprep.verify("a", quik=True)  # type: ignore[call-overload]
    wdsprep.verify(5)  # type: ignore[call-overload]
    wdsprep.Encode()  # type: ignore[call-arg]
    wdsprep.load("a")  # type: ignore[call-arg]
    wdsprep.load("a", global_batch="8")  # type: ignore[arg-type]
    wdsprep.load("a", batch_size=8)  # type: ignore[call-arg]
    wdsprep.Stream("a", wight=2)  # type: ignore[call-arg]
    wdsprep.Stream("a", weight="2")  # type: ignore[arg-type]
    wdsprep.stream("a", global_batch=2)  # type: ignore[call-arg]
    wdsprep.remove("a", keys=5)  # type: ignore[call-overload]
    wdsprep.select("a")  # type: ignore[call-arg]
    wdsprep.export("a", "b")  # type: ignore[call-arg]
    wdsprep.inspect()  # type: ignore[call-overload]
    wdsprep.duplicates("a", distance="3")  # type: ignore[call-overload]
    wdsprep.card("a", yes="no")  # type: ignore[call-overload]
    wdsprep.report("a", outputs="b")  # type: ignore[call-overload]
    wdsprep.repair()  # type: ignore[call-arg]
    wdsprep.import_("a", "b", resolution="64")  # type: ignore[arg-type]
