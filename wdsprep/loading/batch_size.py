"""The check that a batch does not hold a sample twice, unless the user wants that.

A batch that is larger than all there is to serve is refused, with a size that fits. So is one of
a shape, or of a stream with `homogeneous`, where none of them fills it. Where only some of them are
smaller, a line in the log says so: with many shapes a few rare ones are usual. A user who names the
steps of an epoch, or how much of each stream it holds, has asked for what comes of it.
"""

import logging
import math
from collections.abc import Sequence

from wdsprep.errors import UsageError
from wdsprep.loading.arguments import LoadPlan
from wdsprep.loading.order import OrderStream
from wdsprep.loading.order.mixing import StreamAmount
from wdsprep.text import plural

_log = logging.getLogger("wdsprep")


def check_batch_size(plan: LoadPlan) -> None:
    """Refuse a batch that would hold samples twice without having been asked to."""
    order = plan.order
    as_they_come = [stream for stream in order.streams if stream.amount == StreamAmount()]
    if order.epoch_steps is not None or not as_they_come:
        return
    if order.epoch_samples < order.global_batch:
        raise UsageError(_too_large(plan))
    if order.homogeneous:
        _check_groups(plan, as_they_come)


def _check_groups(plan: LoadPlan, as_they_come: Sequence[OrderStream]) -> None:
    """Check the parts of a step that are each of one stream, or of one shape of it."""
    group = plan.order.group
    small = [stream for stream in as_they_come if stream.samples < group]
    largest = max(stream.samples for stream in plan.order.streams)
    name = "shape_batch" if group < plan.order.global_batch else "global_batch"
    what = "shape" if any(stream.part_of is not None for stream in small) else "stream"
    if largest < group:
        few = f"the largest {what} has {plural(largest, 'sample')}, fewer than {name}={group}"
        raise UsageError(f"{_places(plan)}: {few}, {_remedy(plan, largest)}")
    if small and plan.rank == 0:
        of = f"{len(small):,} of {plural(len(plan.order.streams), what)}"
        samples = plural(sum(stream.samples for stream in small), "sample")
        _log.warning(
            "%s: %s, with %s, have fewer than %s=%d: a batch of them holds some several times; a "
            "smaller %s repeats less",
            *(_places(plan), of, samples, name, group, name),
        )


def _too_large(plan: LoadPlan) -> str:
    order = plan.order
    there = plural(order.epoch_samples, "sample")
    few = f"{there} to serve, fewer than global_batch={order.global_batch}"
    largest = max(s.samples for s in order.streams) if order.homogeneous else order.epoch_samples
    return f"{_places(plan)}: {few}, {_remedy(plan, largest)}"


def _remedy(plan: LoadPlan, most: int) -> str:
    """Return what to give in place of a batch that is larger than `most` samples."""
    order = plan.order
    group = order.group if order.group < order.global_batch and order.group <= most else 1
    unit = math.lcm(plan.world, group)
    most = order.epoch_samples if group > 1 else most
    fits = most // unit * unit
    steps = max(1, order.epoch_samples // order.global_batch)
    repeats = f"epoch_steps={steps} if samples are to come several times in a batch"
    if not fits:
        return f"and too few for {plural(plan.world, 'rank')}: give {repeats}"
    alone = " without shape_batch" if group == 1 and order.group < order.global_batch else ""
    return f"which would repeat some: give global_batch={fits}{alone} or less, or {repeats}"


def _places(plan: LoadPlan) -> str:
    return ", ".join(dict.fromkeys(dataset.store.url for dataset in plan.datasets))
