"""What else a machine does while something is measured."""

from __future__ import annotations

from streamrl.machine.cpu_load import CpuSeconds, MachineLoad


def test_the_load_is_what_others_used_per_second() -> None:
    before = CpuSeconds(clock=100.0, busy=1000.0, stolen=5.0, own=10.0)
    load = MachineLoad.between(before, CpuSeconds(110.0, 1018.0, 6.0, 15.0), cores=2)
    assert load == MachineLoad(cores=2, others=1.3, stolen=0.1)
    assert load.disturbed and str(load) == "other processes kept 1.3 of 2 cores busy"
    assert str(MachineLoad(4, 0.0, 1.0)).endswith(", and its host withheld 1.0")


def test_own_work_is_no_disturbance() -> None:
    load = MachineLoad.between(CpuSeconds(0.0, 0.0, 0.0, 0.0), CpuSeconds(10.0, 19.0, 0.0, 20.0), cores=2)
    assert load == MachineLoad(2, 0.0, 0.0) and not load.disturbed


def test_this_machine_s_counters_go_up() -> None:
    before = CpuSeconds.read()
    sum(range(10**6))
    after = CpuSeconds.read()
    assert after.clock > before.clock and after.busy >= before.busy and after.own >= before.own > 0
