"""The CPU of this machine: its name, and the instructions that matter for matrix products."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CPUINFO = Path("/proc/cpuinfo")
BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "avx512f", "bf16", "svebf16"})
"""Instructions for which oneDNN has bf16 kernels; plain AVX-512 emulates them at the speed of fp32 or above. Without
any of these torch falls back to its own loops, measured at 4 to 40 times slower than fp32."""
LIMITS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
"""Environment variables that keep torch and oneDNN from using instructions that the CPU has."""


@dataclass(frozen=True)
class Cpu:
    """The properties of a CPU that decide which kernels run."""

    name: str
    flags: frozenset[str]
    """Instructions as listed by the system; empty if it lists none."""
    limits: tuple[str, ...] = ()
    """NAME=VALUE of the `LIMITS` that are set."""

    @property
    def has_bf16(self) -> bool:
        """Whether bf16 kernels exist for its instructions and may be used.

        True if the system lists no instructions: the probe then decides alone.
        """
        return not self.flags or (bool(self.flags & BF16_FLAGS) and not self._limited)

    @property
    def has_int8(self) -> bool:
        """Whether int8 kernels exist for its instructions and may be used: those of AVX-512 VNNI."""
        return "avx512_vnni" in self.flags and not self._limited

    @property
    def _limited(self) -> bool:
        """Whether the environment keeps libraries from using AVX-512."""
        given = [limit.lower().split("=", 1) for limit in self.limits]
        # torch calls its slowest kernels "default", and oneDNN calls having no limit so
        return any(
            value.startswith(("sse", "avx2")) or value == ("default" if key == "aten_cpu_capability" else "avx")
            for key, value in given
        )

    @property
    def instructions(self) -> str:
        """The widest instructions, in words: 'AVX2 without AVX-512'."""
        if not self.flags:
            return "unknown instructions"
        names = {
            "amx_bf16": "AMX",
            "avx512_bf16": "AVX-512 with bf16",
            "avx512f": "AVX-512",
            "avx2": "AVX2 without AVX-512",
            "bf16": "NEON with bf16",
            "asimd": "NEON",
        }
        found = next((text for flag, text in names.items() if flag in self.flags), "neither AVX2 nor NEON")
        return f"{found}, limited by {', '.join(self.limits)}" if self.limits else found

    def fingerprint(self, *facts: Any) -> str:
        """Return a hash of this CPU and further facts on which a measurement depends."""
        every = [self.name, sorted(self.flags), self.limits, *facts]
        return hashlib.blake2b(json.dumps(every).encode(), digest_size=8).hexdigest()

    def __str__(self) -> str:
        return f"{self.name} ({self.instructions})"


def parse_cpuinfo(text: str, machine: str, environ: Mapping[str, str]) -> Cpu:
    """Parse the text of /proc/cpuinfo, of x86 or ARM.

    Args:
        text: the file's text; may be empty.
        machine: the architecture, used for a CPU without a name.
        environ: environment variables.
    """
    name, flags = "", frozenset[str]()
    for line in text.splitlines():
        key, _, value = line.partition(":")
        key = key.strip().lower()
        if key == "model name" and not name:
            name = value.strip()
        elif key in ("flags", "features") and not flags:
            flags = frozenset(value.split())
    limits = tuple(f"{key}={environ[key]}" for key in LIMITS if environ.get(key))
    return Cpu(name or machine or "unknown CPU", flags, limits)


@functools.cache
def this_cpu() -> Cpu:
    """Return the CPU of this machine."""
    try:
        text = CPUINFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    return parse_cpuinfo(text, platform.machine(), os.environ)
