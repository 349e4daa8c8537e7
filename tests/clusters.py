"""Ray clusters of several nodes on this machine."""

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def ray_cluster(*, cpus: int) -> Iterator[Any]:
    """A head with so many cores, to which this process is connected."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": cpus, "include_dashboard": False}
    )
    ray.init(cluster.address, log_to_driver=False, logging_level="ERROR")
    yield cluster
    ray.shutdown()
    cluster.shutdown()
