"""Which way a run's weights take."""

from __future__ import annotations

from typing import Any

import pytest

from streamrl.config.cluster import ClusterConfig
from streamrl.config.run import RunConfig
from streamrl.weights.backends.base import NCCL, STREAMED, WeightPath, weight_path


@pytest.mark.parametrize(
    ("changes", "cuda", "several_sites", "path"),
    [
        ({}, False, False, STREAMED),
        ({}, True, False, NCCL),
        ({}, True, True, STREAMED),
        ({"schedule": {"name": "colocated"}}, True, False, STREAMED),  # NCCL has no two members on one GPU
        ({"weights": {"generation_dtype": "fp8"}}, True, False, STREAMED),
        ({"weights": {"backend": "stream"}}, True, False, STREAMED),
        ({"weights": {"backend": "nccl"}}, True, False, NCCL),
    ],
)
def test_nccl_is_for_gpus_of_one_site_that_are_not_shared(
    changes: dict[str, Any], cuda: bool, several_sites: bool, path: WeightPath
) -> None:
    pool = {"name": "all", "replicas": 1}
    sites: dict[str, Any] = {"home": {"trainer": {}, "generation": [pool]}}
    links = []
    if several_sites:
        sites["far"] = {"generation": [pool]}
        links = [{"between": ["home", "far"], "bandwidth_gbit_s": 1, "rtt_ms": 1}]
    cluster = {"hardware": "cuda" if cuda else "cpu", "sites": sites, "links": links}
    assert weight_path(RunConfig.model_validate(changes), ClusterConfig.model_validate(cluster)) == path


def test_nccl_on_shared_gpus_is_refused_when_the_file_is_read() -> None:
    with pytest.raises(ValueError, match=r"nccl needs a GPU of its own.*set backend: auto or stream"):
        RunConfig.model_validate({"schedule": {"name": "colocated"}, "weights": {"backend": "nccl"}})
