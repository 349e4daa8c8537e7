"""Who packs on which machines: pure decisions."""

import pytest

from wdsprep.fetch.options import FetchRules
from wdsprep.packing.worker_plan import PackWorkerPlan, WantedWorkers, plan_workers

RULES = FetchRules(in_flight=256, per_host=8)


def local(workers: int, *, slices: int = 1_000) -> PackWorkerPlan:
    return plan_workers(WantedWorkers(workers=workers), slices=slices, fetch=RULES)


def on_ray(workers: int, cpus: int) -> PackWorkerPlan:
    return plan_workers(WantedWorkers(workers=workers, node_cpus=cpus), slices=1_000, fetch=RULES)


def share(plan: PackWorkerPlan) -> tuple[int, int]:
    assert plan.fetch is not None
    return plan.fetch.in_flight, plan.fetch.per_host


def test_local_workers_share_the_bounds_of_their_machine() -> None:
    assert share(local(1)) == (256, 8)
    assert share(local(2)) == (128, 4)
    assert (local(2).workers, local(2).threads, local(2).slices) == (2, 1, 3)
    few = local(6, slices=2)
    assert (few.workers, few.threads, few.slices, *share(few)) == (2, 3, 1, 128, 4)


@pytest.mark.parametrize("workers", [1, 3, 8, 9, 16, 64, 200])
@pytest.mark.parametrize("cpus", [1, 2, 7, 8, 9, 16, 64, 192])
def test_no_machine_asks_for_more_than_it_may(workers: int, cpus: int) -> None:
    here = local(workers)
    assert here.workers * share(here)[1] <= RULES.per_host
    assert here.workers * here.threads <= workers
    for wanted in (0, workers):
        plan = on_ray(wanted, cpus)
        there = min(cpus // plan.cpus, wanted or cpus)
        assert plan.workers == wanted
        assert there * share(plan)[1] <= RULES.per_host
        assert there * share(plan)[0] <= RULES.in_flight


def test_a_node_with_many_cores_has_workers_with_several() -> None:
    plan = on_ray(0, 64)
    assert (plan.workers, plan.cpus, plan.threads, *share(plan)) == (0, 8, 8, 32, 1)
    plan = on_ray(0, 4)
    assert (plan.cpus, plan.threads, *share(plan)) == (1, 1, 64, 2)
