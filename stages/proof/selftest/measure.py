"""Compute the constants of the estimate from the times of probes. A difference that is not positive is left out."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from stages.air import limits
from stages.estimate.constants import Machine
from stages.proof.selftest.probes import FEW, MANY, RATES, STREAMS, probes
from stages.proof.selftest.resident import Resident
from stages.proof.selftest.streams import Streams

Times = Mapping[str, float]
"""Seconds of a submission, by probe."""

Code = Mapping[str, Sequence[int]]
"""Bytes of code that each launch loads, by probe (`stages.estimate.price.compiled_code`)."""

CLOCK_GHZ = Machine().clock_ghz
"""The clock that the estimate's rates per cycle refer to: times alone do not show it."""

ELEMENTWISE = ("rate_add", "rate_rms_norm", "rate_rope", "rate_silu_and_mul")
"""Probes of functions that multiply no matrices."""

BASE = f"launch_row_{FEW}"
"""The probe that does almost nothing."""

TIMED = (
    *(f"{kind}_{count}" for kind in ("launch_row", "launch_array", "step_array") for count in (FEW, MANY)),
    *(f"stream_{count}" for count in STREAMS),
    *RATES,
)

MODES = {"rate_gemm": "macs_bf16", "rate_gemm_bfp16": "macs_bf16_x_bfp16"}


RATES_OF_TABLE = {
    *("configuration_core_us", "configuration_kib_us", "configuration_us", "submission_us", "ddr_gbps", "stream_gbps"),
    *("vector_cycles", "scheduled_cycles"),
    *MODES.values(),
}
"""The rates of the estimate's table that a selftest on hardware measures."""


def constants(times: Times, code: Code) -> dict[str, float]:
    """Return constants with the names and units of the estimate's table, and more of the same kind."""
    constants = {**_launches(times, code), **_streams(times), **_rates(times)}
    return {name: value for name, value in constants.items() if value > 0}


def _each(times: Times, kind: str) -> float:
    """Return the microseconds of one more launch or step."""
    return 1e6 * (times[f"{kind}_{MANY}"] - times[f"{kind}_{FEW}"]) / (MANY - FEW)


def _launches(times: Times, code: Code) -> dict[str, float]:
    """Return the costs of launches that do almost nothing, so that configuring their cores takes all of the time.

    Launches on all cores take longer than those on a row of them by what loading their code takes. Where its bytes are
    not known, each core counts the same.
    """
    if any(f"{kind}_{n}" not in times for kind in ("launch_row", "launch_array", "step_array") for n in (FEW, MANY)):
        return {}
    row, array, step = (_each(times, kind) for kind in ("launch_row", "launch_array", "step_array"))
    core = (array - row) / (limits.COLUMNS * (limits.ROWS - 1))
    loading, by_code = limits.COLUMNS * core, {}
    row_kib, array_kib = (code.get(f"{kind}_{MANY}", [0])[0] / 1024 for kind in ("launch_row", "launch_array"))
    if 0 < row_kib < array_kib:
        by_code["configuration_kib_us"] = kib = (array - row) / (array_kib - row_kib)
        loading = row_kib * kib
    return {
        "launch_row_us": row,
        "launch_array_us": array,
        "grid_step_us": step,
        "configuration_core_us": core,
        **by_code,
        "configuration_us": row - loading,
        "submission_us": 1e6 * times[BASE] - FEW * row,
    }


def _streams(times: Times) -> dict[str, float]:
    rates = {}
    for count in STREAMS:
        name, source = f"stream_{count}", probes()[f"stream_{count}"].source
        if name in times and BASE in times and times[name] > times[BASE]:
            assert isinstance(source, Streams)
            rates[f"read_{count}_gbps"] = source.bytes / (times[name] - times[BASE]) / 1e9
    best = {"ddr_gbps": max(rates.values())} if rates else {}
    first = f"read_{STREAMS[0]}_gbps"
    return rates | best | ({"stream_gbps": rates[first]} if first in rates else {})


def _rates(times: Times) -> dict[str, float]:
    """Return rates of tile functions; those of vector operations are medians over functions that have them."""
    rates, vectors, scheduled = {}, [], []
    for name in RATES:
        source = probes()[name].source
        assert isinstance(source, Resident)
        spent = times.get(name, 0) - times.get(BASE, 0)
        if name not in times or BASE not in times or spent <= 0:
            continue
        cycles = spent / source.calls * CLOCK_GHZ * 1e9
        short = name.removeprefix("rate_")
        rates[f"{short}_cycles"] = cycles
        if source.macs:
            rates[MODES.get(name, f"{short}_macs_per_cycle")] = source.macs / cycles
        if source.values:
            rates[f"{short}_values_per_cycle"] = source.values / cycles
        cost, working = source.costs[str(source.step[0])], cycles - Machine().call_cycles
        if cost.scheduled:
            scheduled.append(working / cost.scheduled)
        if name in ELEMENTWISE:
            vectors.append(working / cost.vectors)
    medians = {"vector_cycles": vectors, "scheduled_cycles": scheduled}
    return rates | {name: statistics.median(found) for name, found in medians.items() if found}
