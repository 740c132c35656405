"""Which of vLLM's weight-transfer backends a run uses."""

from __future__ import annotations

from typing import Any

import pytest

from streamrl.config.run import RunConfig
from streamrl.generation.instance.engine_config import weight_backend
from streamrl.generation.instance.vllm_plugin import BACKEND


@pytest.mark.parametrize(
    ("changes", "cuda", "several_sites", "backend"),
    [
        ({}, False, False, BACKEND),
        ({}, True, False, "nccl"),
        ({}, True, True, BACKEND),
        ({"schedule": {"name": "colocated"}}, True, False, BACKEND),  # NCCL has no two members on one GPU
        ({"weights": {"generation_dtype": "fp8"}}, True, False, BACKEND),
        ({"weights": {"backend": "stream"}}, True, False, BACKEND),
        ({"weights": {"backend": "nccl"}}, True, False, "nccl"),
    ],
)
def test_nccl_is_for_gpus_of_one_site_that_are_not_shared(
    changes: dict[str, Any], cuda: bool, several_sites: bool, backend: str
) -> None:
    assert weight_backend(RunConfig.model_validate(changes), cuda, several_sites) == backend


def test_nccl_on_shared_gpus_is_refused_when_the_file_is_read() -> None:
    with pytest.raises(ValueError, match=r"nccl needs a GPU of its own.*set backend: auto or stream"):
        RunConfig.model_validate({"schedule": {"name": "colocated"}, "weights": {"backend": "nccl"}})
