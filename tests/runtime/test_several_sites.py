"""What each site starts, listens on and must agree on: pure."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

from streamrl.agents import agents_process
from streamrl.config.cluster import ClusterConfig
from streamrl.config.load import load_cluster
from streamrl.config.run import RunConfig
from streamrl.errors import RunFailed, UserError
from streamrl.launcher import gpu_checks, preflight
from streamrl.launcher.emulated_cluster import emulated
from streamrl.launcher.site_setup import choose_addresses, prepare
from streamrl.run_dir import layout
from streamrl.runtime.handshake import agreement, disagreement
from streamrl.runtime.process_context import Addresses, RoleContext
from streamrl.runtime.process_plan import plan_processes
from streamrl.transport.curve import make_keys
from streamrl.transport.flow import Flow
from tests.tiny_model import save_tiny_model

FILES = Path(__file__).parents[2] / "cluster_configs"


def cluster(**changes: Any) -> ClusterConfig:
    values: dict[str, Any] = {
        "hardware": "cuda",
        "sites": {
            "train": {"address": "localhost", "port": 5600, "trainer": {"ranks": 2, "gpu": "H800"}},
            "generate": {"generation": [{"replicas": 3, "gpus_per_replica": 2, "gpu": "H20"}]},
        },
        "links": [{"between": ["train", "generate"], "bandwidth_gbit_s": 10, "rtt_ms": 5}],
    }
    return ClusterConfig.model_validate(values | changes)


def test_each_site_starts_its_own_share_with_gpus_counted_from_its_own_first() -> None:
    every = plan_processes(cluster(), RunConfig(), Path("runs/x"))
    train = plan_processes(cluster(), RunConfig(), Path("runs/x"), ["train"])
    generate = plan_processes(cluster(), RunConfig(), Path("runs/x"), ["generate"])
    assert [spec.name for spec in train] == ["controller", "trainer", "rewards-train"]
    assert [spec.name for spec in generate] == ["service-generate", *(f"generate-regular-{n}" for n in range(3))]
    assert every == train + generate
    assert [spec.gpu_ids for spec in generate[1:]] == [(0, 1), (2, 3), (4, 5)]


def test_sites_with_folders_of_their_own_get_them() -> None:
    specs = plan_processes(cluster(), RunConfig(), Path("a"), None, {"train": Path("a"), "generate": Path("b")})
    folders = {spec.name: spec.command[spec.command.index("--run-dir") + 1] for spec in specs}
    assert folders["trainer"] == folders["controller"] == "a"
    assert folders["service-generate"] == folders["generate-regular-0"] == "b"


SOCKETS = Path("/tmp/sockets")


def test_only_the_trainers_site_listens_to_the_outside() -> None:
    home = choose_addresses(cluster(), "train", SOCKETS)
    assert home.controller_outside == "tcp://127.0.0.1:5600"
    assert home.publisher_outside == "tcp://127.0.0.1:5601"
    assert (home.controller, home.publisher) == ("ipc:///tmp/sockets/controller", "ipc:///tmp/sockets/publisher")
    away = choose_addresses(cluster(), "generate", SOCKETS)
    assert (away.controller, away.publisher) == ("tcp://localhost:5600", "tcp://localhost:5601")
    assert away.controller_outside == "" and away.services == {"generate": "ipc:///tmp/sockets/service-generate"}


def test_a_site_whose_own_name_is_a_loopback_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(socket.AF_INET, 1, 6, "", ("127.0.1.1", 0))])
    values = cluster().model_dump()
    values["sites"]["train"]["address"] = "gpu-1"
    with pytest.raises(RunFailed, match=r"'gpu-1', the address of this site, is 127\.0\.1\.1 here"):
        choose_addresses(ClusterConfig.model_validate(values), "train", SOCKETS)
    values["sites"]["train"]["listen"] = "0.0.0.0"
    found = choose_addresses(ClusterConfig.model_validate(values), "train", SOCKETS)
    assert found.controller_outside == "tcp://0.0.0.0:5600"


def test_a_site_may_have_an_ipv6_address() -> None:
    values = cluster().model_dump()
    values["sites"]["train"] |= {"address": "[fd00::7]", "listen": "::"}
    read = ClusterConfig.model_validate(values)
    home, away = (choose_addresses(read, site, SOCKETS) for site in ("train", "generate"))
    assert (home.controller_outside, home.publisher_outside) == ("tcp://[::]:5600", "tcp://[::]:5601")
    assert (away.controller, away.publisher) == ("tcp://[fd00::7]:5600", "tcp://[fd00::7]:5601")
    values["sites"]["train"] |= {"address": "::1", "listen": ""}
    assert (
        choose_addresses(ClusterConfig.model_validate(values), "train", SOCKETS).controller_outside
        == "tcp://[::1]:5600"
    )


@pytest.mark.parametrize("name", ["heterogeneous.yaml", "cross_datacenter.yaml"])
def test_the_shipped_files_are_valid_and_can_be_emulated(name: str) -> None:
    read = load_cluster(FILES / name)
    small = emulated(read)
    assert small.hardware == "cpu" and small.links == read.links
    specs = [spec for spec in plan_processes(small, RunConfig(), Path("x")) if spec.role == "instance"]
    assert len(specs) == sum(len(site.generation) for site in read.sites.values())
    assert {spec.gpu for spec in specs} == {pool.gpu for site in read.sites.values() for pool in site.generation}
    assert all(spec.gpu_ids == () for spec in specs)
    assert emulated(small) == small
    (problem,) = gpu_checks.check_gpus(read, RunConfig(), [], "train" if "train" in read.sites else "frankfurt")
    assert "this machine has 0; --emulate runs all sites here on CPU" in problem


@pytest.mark.parametrize("key", ["tensor_parallel", "sequence_parallel"])
def test_emulated_ranks_share_nothing(key: str) -> None:
    values = load_cluster(FILES / "cross_datacenter.yaml").model_dump()
    home = next(site for site in values["sites"].values() if site["trainer"])
    home["trainer"] |= {"ranks": 4, key: 4}
    small = emulated(ClusterConfig.model_validate(values))
    trainer = small.sites[small.trainer_site].trainer
    assert trainer is not None and trainer.sharing == 1


def test_emulated_processes_are_not_pinned_to_cores_of_other_machines() -> None:
    values = load_cluster(FILES / "heterogeneous.yaml").model_dump()
    for site in values["sites"].values():
        for part in [*site["generation"], site["agents"], *filter(None, [site["trainer"]])]:
            part["cores"] = [90, 91]
    pinned = ClusterConfig.model_validate(values)
    assert "[90, 91]" in str(pinned.model_dump())
    assert "[90, 91]" not in str(emulated(pinned).model_dump())


def test_one_site_has_nothing_to_emulate() -> None:
    with pytest.raises(UserError, match="this one has one"):
        emulated(load_cluster(FILES / "local.yaml"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"links": []}, "no link between 'train' .* and 'generate'"),
        ({"links": [{"between": ["train", "genrate"], "bandwidth_gbit_s": 1, "rtt_ms": 1}]}, "no site 'genrate'"),
        ({"links": [{"between": ["train", "train"], "bandwidth_gbit_s": 1, "rtt_ms": 1}]}, "two different sites"),
        ({"links": [{"between": ["train", "generate"], "bandwidth_gbit_s": 1, "rtt_ms": 1}] * 2}, "comes twice"),
        ({"links": [{"between": ["train", "generate"], "bandwidth_gbit_s": 0, "rtt_ms": 1}]}, "greater than 0"),
        ({"links": [{"between": ["train", "generate"], "bandwidth_gbit_s": 1, "rtt_ms": -1}]}, "greater than or equal"),
        ({"sites": {"a": {"trainer": {}}, "b": {"trainer": {}, "generation": [{}]}}, "links": []}, "exactly one site"),
        ({"sites": {"a": {"trainer": {}, "generation": [{}]}, "b": {}}, "links": []}, "a 'generation' pool, or both"),
    ],
)
def test_links_and_sites_that_make_no_sense_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cluster(**changes)


def test_what_several_sites_cannot_do_is_said() -> None:
    run = RunConfig.model_validate({"schedule": {"name": "auto"}})
    pushed = RunConfig.model_validate({"weights": {"backend": "nccl"}})
    no_port = cluster(
        sites={"train": {"trainer": {}}, "generate": {"generation": [{}]}},
    )
    first, second = preflight.check_sites(no_port, run)
    assert "expected one of sync, stream, one_step_off, async" in first
    assert "sites.train.port" in second
    assert "works inside one site" in next(iter(preflight.check_sites(no_port, pushed)))
    assert list(preflight.check_sites(cluster(), RunConfig())) == []


def test_missing_keys_are_told_with_the_command_that_makes_them(tmp_path: Path) -> None:
    security = {"keys": str(tmp_path)}
    assert "streamrl keys" in "".join(preflight.check_keys(cluster(security=security), "generate"))
    none = cluster(security=security | {"encryption": "none"})
    assert list(preflight.check_keys(none, "generate")) == []


def test_keys_of_sites_that_pass_weights_on_and_of_those_that_fetch_them_are_checked_at_the_start(
    tmp_path: Path,
) -> None:
    relay = {"address": "localhost", "port": 5700, "generation": [{}]}
    sites = {"train": {"address": "localhost", "port": 5600, "trainer": {}}, "a": {"generation": [{}]}, "b": relay}
    pairs = (("train", "a"), ("train", "b"), ("a", "b"))
    links = [{"between": pair, "bandwidth_gbit_s": 1, "rtt_ms": 5} for pair in pairs]
    several = cluster(sites=sites, links=links, security={"keys": str(tmp_path)})
    for site in sites:
        make_keys(tmp_path, site)
    assert [problem for site in sites for problem in preflight.check_keys(several, site)] == []
    for missing, at in (("b", "a"), ("a", "b")):
        (tmp_path / f"{missing}.key").rename(tmp_path / "away")
        (problem,) = preflight.check_keys(several, at)
        assert f"{missing}.key: no such file" in problem
        (tmp_path / "away").rename(tmp_path / f"{missing}.key")


def test_sites_agree_on_everything_but_where_things_lie(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "a")
    save_tiny_model(tmp_path / "b")

    def run(**changes: Any) -> RunConfig:
        return RunConfig.model_validate({"model": {"path": str(tmp_path / "a")}} | changes)

    mine = agreement(cluster(), run())
    assert disagreement(mine, agreement(cluster(), run(steps=99, name="other")), "train", "generate") is None
    elsewhere = run(model={"path": str(tmp_path / "b")})
    assert disagreement(mine, agreement(cluster(security={"keys": "other"}), elsewhere), "train", "generate") is None
    text = disagreement(mine, agreement(cluster(), run(sampling={"max_tokens": 7})), "train", "generate")
    assert text is not None and "run sampling.max_tokens is 7 at generate and 128 at train" in text
    text = disagreement(
        mine, agreement(cluster(), run(model={"path": str(tmp_path / "a"), "dtype": "float32"})), "train", "generate"
    )
    assert text is not None and "model.dtype is 'float32' at generate and 'auto' at train" in text
    (tmp_path / "b" / "tokenizer.json").write_text("{}")
    text = disagreement(mine, agreement(cluster(), elsewhere), "train", "generate")
    assert text is not None and "tokenizer.json" in text
    assert "does not say" in (disagreement(mine, None, "train", "generate") or "")


def test_copies_of_a_model_with_other_end_tokens_or_another_template_differ(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_tiny_model(tmp_path / name)
    mine, theirs = (tmp_path / name for name in ("a", "b"))

    def differs() -> str | None:
        both = (RunConfig.model_validate({"model": {"path": str(folder)}}) for folder in (mine, theirs))
        here, there = (agreement(cluster(), run) for run in both)
        return disagreement(here, there, "train", "generate")

    (mine / "chat_template.jinja").unlink()
    (mine / "generation_config.json").write_text('{"eos_token_id": [2, 7], "temperature": 1}')
    (theirs / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
    (mine / "tokenizer_config.json").write_text('{"eos_token": "</s>", "chat_template": "{{ x }}"}')
    (theirs / "tokenizer_config.json").write_text('{"eos_token": {"content": "</s>"}, "extra": 1}')
    (theirs / "chat_template.jinja").write_text("{{ x }}\n")
    assert differs() is None  # written in other ways
    (theirs / "generation_config.json").write_text('{"eos_token_id": 2}')
    assert "model's end tokens is '2' at generate and '2, 7' at train" in (differs() or "")
    for folder in (mine, theirs):
        (folder / "generation_config.json").unlink()  # then the model's own config has them
    assert differs() is None
    (theirs / "config.json").write_text('{"eos_token_id": [2, 7]}')
    assert "model's end tokens is '2, 7' at generate and '257' at train" in (differs() or "")
    (mine / "config.json").write_text('{"text_config": {"eos_token_id": [7, 2]}}')
    assert differs() is None
    (theirs / "config.json").write_text('{"eos_token_id": 3, "text_config": {"eos_token_id": [2, 7]}}')
    assert "model's end tokens is '3' at generate and '2, 7' at train" in (differs() or "")
    for folder in (mine, theirs):
        (folder / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    assert differs() is None
    (theirs / "chat_template.jinja").write_text("{{ y }}")
    assert "chat template" in (differs() or "")
    (theirs / "chat_template.jinja").unlink()
    assert "chat template (BLAKE3) is None at generate" in (differs() or "")


class Made(Exception):
    """Ends a process that has made its link."""


@pytest.mark.parametrize(("site", "fewest", "most"), [("generate", 10_000, 1_000_000), ("train", 256, 256)])
def test_ended_episodes_of_another_site_wait_for_a_link_that_is_down(
    site: str, fewest: int, most: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They are acknowledged once they are committed: a limit that they reach before that would end their process."""
    flows = []

    def link(*_: Any, flow: Flow) -> None:
        flows.append(flow)
        raise Made

    monkeypatch.setattr(agents_process, "Link", link)
    monkeypatch.setattr(agents_process, "AgentHost", lambda *_: AsyncMock(notes=[]))
    monkeypatch.setattr(agents_process, "EpisodeWorkers", lambda *_: AsyncMock())
    run = RunConfig.model_validate({"model": {"path": str(save_tiny_model(tmp_path / "model"))}})
    context = RoleContext(f"agents-{site}", site, tmp_path, cluster(), run, Addresses("", "", {}), False)
    with pytest.raises(Made):
        asyncio.run(agents_process.AgentsProcess(context).run())
    assert fewest <= flows[0].credits <= most


def test_the_agents_process_of_an_emulated_site_can_open_the_log_of_its_workers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def link(*_: Any, **__: Any) -> None:
        raise Made

    monkeypatch.setattr(agents_process, "Link", link)
    monkeypatch.setattr(agents_process, "AgentHost", lambda *_: AsyncMock(notes=[]))
    run = RunConfig.model_validate({"model": {"path": str(save_tiny_model(tmp_path / "model"))}})
    (run_dir := tmp_path / "run").mkdir()
    with prepare(emulated(cluster()), run, run_dir, emulate=True) as share:
        for site, folder in share.folders.items():
            context = RoleContext.load(f"agents-{site}", site, folder, False)
            with pytest.raises(Made):
                asyncio.run(agents_process.AgentsProcess(context).run())
            assert (folder / layout.LOGS / f"agents-{site}-workers.log").is_file()
    assert len(share.folders) == 2
