"""The check that a batch does not hold a sample twice, unless the user wants that.

A batch that is larger than all the samples is refused, and the error gives a size that fits. If
each batch is of one shape or stream, it is refused when none of these has enough samples for it.
When only some of them are smaller, a line in the log says so: among many shapes a few are rare. A
user who sets the steps of an epoch, or how much of each stream it holds, has asked for repeats.
"""

import logging
import math
from collections.abc import Sequence

from wdsprep.errors import UsageError
from wdsprep.loading.load_plan import LoadPlan
from wdsprep.loading.order.global_order import OrderStream
from wdsprep.loading.order.mixing import StreamAmount
from wdsprep.text import plural

_log = logging.getLogger("wdsprep")


def check_batch_size(plan: LoadPlan) -> None:
    """Raise UsageError if a batch would hold samples twice and the user did not ask for it.

    If only some of several shapes or streams are too small, log a warning instead.
    """
    order = plan.order
    unweighted = [stream for stream in order.streams if stream.amount == StreamAmount()]
    if order.epoch_steps is not None or not unweighted:
        return
    if order.epoch_samples < order.global_batch:
        raise UsageError(_explain_too_large(plan))
    if order.homogeneous:
        _check_groups(plan, unweighted)


def _check_groups(plan: LoadPlan, unweighted: Sequence[OrderStream]) -> None:
    """Raise UsageError if no stream or shape fills its part of a step; warn if some do not."""
    group = plan.order.group
    small = [stream for stream in unweighted if stream.samples < group]
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
            "%s: %s (%s in all) have fewer samples than %s=%d, and repeat some in a batch: a "
            "smaller %s repeats fewer",
            *(_places(plan), of, samples, name, group, name),
        )


def _explain_too_large(plan: LoadPlan) -> str:
    order = plan.order
    samples = plural(order.epoch_samples, "sample")
    few = f"{samples} to serve, fewer than global_batch={order.global_batch}"
    largest = max(s.samples for s in order.streams) if order.homogeneous else order.epoch_samples
    return f"{_places(plan)}: {few}, {_remedy(plan, largest)}"


def _remedy(plan: LoadPlan, most: int) -> str:
    """Return advice for a batch larger than `most` samples: a size that fits, or `epoch_steps=`."""
    order = plan.order
    group = order.group if order.group < order.global_batch and order.group <= most else 1
    unit = math.lcm(plan.world, group)
    most = order.epoch_samples if group > 1 else most
    fits = most // unit * unit
    steps = max(1, order.epoch_samples // order.global_batch)
    repeats = f"epoch_steps={steps} if a batch may hold samples several times"
    if not fits:
        return f"and too few for {plural(plan.world, 'rank')}: give {repeats}"
    alone = " without shape_batch" if group == 1 and order.group < order.global_batch else ""
    return f"which would repeat some: give global_batch={fits}{alone} or less, or {repeats}"


def _places(plan: LoadPlan) -> str:
    return ", ".join(dict.fromkeys(dataset.store.url for dataset in plan.datasets))
