"""The page of `doit estimate`, from the figures of `estimate_figures`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from llama_npu2.cli.table import amount
from stages.air import limits
from stages.air.placement import CORES, MEMORY, SHIM, Tile
from stages.estimate import work
from stages.estimate.ranges import between, per_second
from stages.reports.estimated import ARRAY_SIDE, HOST_SIDE, TAKE_TURNS, TOKEN
from stages.reports.pages import (
    Page,
    Series,
    Span,
    bars,
    colour,
    details,
    facts,
    legend,
    note,
    svg,
    table,
    tag,
    time_line,
)

Figures = Mapping[str, Any]

SERIES = (
    *(work.DDR, work.MULTIPLY, work.STREAM, work.ELEMENTWISE),
    *(work.HOST, work.STEP, work.SUBMISSION, work.CONFIGURATION),
)
COLOURS = {limit: f"series-{at}" for at, limit in enumerate(SERIES, 1)} | {work.CALL: "muted", work.CYCLES: "text"}
"""The colour of each limit, by its name."""


def page(figures: Figures) -> Page:
    """Return the page of `estimate_figures.figures`, with `counted` where the simulator ran."""
    token, found = figures["phases"][TOKEN], figures["ranges"][TOKEN]
    shown = Page(
        f"Estimate: {figures['model']} on the NPU",
        f"{per_second(found['low'], found['high'])} tokens/s, by arithmetic, not measured: weights "
        f"{figures['weights']}, grouping {figures['grouping']}. A token after {figures['depth']} others takes "
        f"{_between(found)}, most of it limited by {_most(token)}.",
    )
    shown.add("In short", *_summary(figures))
    prompts = [phase for phase, about in figures["phases"].items() if about["of_prompt"]]
    of_tokens = [phase for phase in figures["phases"] if phase != TOKEN and phase not in prompts]
    tokens = [details(_phase_title(figures, phase), *_time_line(figures, phase)) for phase in of_tokens]
    shown.add("Time line of a token", *_time_line(figures, TOKEN), *tokens)
    first, *later = [
        details(_phase_title(figures, name), *_time_line(figures, name), opened=not at)
        for at, name in enumerate(prompts)
    ]
    more = [details(f"{len(later)} other sizes", *later)] if later else []
    shown.add("Time lines of prompts", first, *more)
    shown.add("DDR by slot", *_traffic(figures))
    shown.add("What launches take of the array", *_array(figures))
    if "counted" in figures:
        shown.add("Counted by the simulator", *_counted(figures["counted"]))
    shown.add("Rates", *_rates(figures["rates"]))
    return shown


def _most(timed: Figures) -> str:
    return max(timed["limits"], key=lambda limit: timed["limits"][limit], default="nothing")


def _phase_title(figures: Figures, phase: str) -> str:
    return f"{phase}: {figures['phases'][phase]['milliseconds']:.1f} ms"


# times


def _summary(figures: Figures) -> Iterator[Markup]:
    moved, ranges = figures["token_bytes"], figures["ranges"]
    yield facts(
        {
            **{
                phase if phase != TOKEN else f"a token after {figures['depth']}": _between(ranges[phase])
                for phase in ranges
            },
            "DDR of a token": amount(moved["moved"]),
            "DDR / bytes of weights": f"{moved['moved'] / moved['weights']:.4f}",
        }
    )
    if figures["streams"]:
        yield _turns(figures["streams"])
    yield _open_rates(ranges)
    phases = list(figures["phases"])
    shares = {
        limit: [figures["phases"][phase]["limits"].get(limit, 0.0) for phase in phases] for limit in _limits(figures)
    }
    totals = [figures["phases"][phase]["milliseconds"] for phase in phases]
    columns = ["phase", ">ms", *(f">{limit}" for limit in shares)]
    rows = [
        [phase, f"{totals[at]:.3f}", *(f"{spents[at]:.3f}" for spents in shares.values())]
        for at, phase in enumerate(phases)
    ]
    numbers = table(columns, rows, "Milliseconds by limit")
    series = [Series(limit, COLOURS[limit], spents) for limit, spents in shares.items()]
    yield bars(phases, series, "ms", "What limits a token and prompts, as shares of their time", numbers, shares=True)
    if len(figures["groupings"]) == 1:
        return
    columns = ["phase", *(f">grouping {name}, ms" for name in figures["groupings"])]
    by_grouping = figures["groupings"].values()
    rows = [[phase, *(f"{of[phase]:.2f}" if phase in of else "none" for of in by_grouping)] for phase in phases]
    yield table(columns, rows, "Milliseconds by grouping")


def _turns(streams: Iterable[Figures]) -> Markup:
    columns = [">sequences", ">at once", ">ms from token to token", ">low", ">high", ">tokens of a turn"]
    columns.append(">caches on the host")
    rows = [
        [
            str(each["sequences"]),
            str(each["together"]),
            *(f"{each[end]:.1f}" for end in ("middle", "low", "high")),
            str(each["tokens"]),
            amount(each["host_bytes"]),
        ]
        for each in streams
    ]
    return table(columns, rows, TAKE_TURNS)


def _between(found: Figures) -> str:
    return f"{between(found['low'], found['high'])} ms, middle {found['middle']:.1f}"


def _open_rates(ranges: Figures) -> Markup:
    """Return what each rate leaves open, within what was published, with the others at their usual values."""
    columns = ["phase", ">middle", ">low", ">high", "rate", ">low with it", ">high with it", "selftest measures it"]
    rows = [
        (
            phase,
            *(f"{found[end]:.1f}" for end in ("middle", "low", "high")),
            rate["rate"],
            f"{rate['low']:.1f}",
            f"{rate['high']:.1f}",
            "yes" if rate["measured_by_selftest"] else "no",
        )
        for phase, found in ranges.items()
        for rate in found["rates"]
    ]
    about = note(
        "Low and high are what the published ranges of the rates leave open, as independent errors add up. Not all of "
        "them are at their worst at once."
    )
    return details(
        "Which rates leave times open", about, table(columns, rows, "Milliseconds by the end of a rate's range")
    )


def _limits(figures: Figures) -> list[str]:
    met = {limit for phase in figures["phases"].values() for limit in phase["limits"]}
    return [limit for limit in COLOURS if limit in met]


def _time_line(figures: Figures, phase: str) -> Iterator[Markup]:
    """Yield what each side does, a colour for each limit, and a table that sums up what is alike."""
    spans: list[Span] = []
    alike: dict[tuple[str, str], list[Figures]] = defaultdict(list)
    begin = 0.0
    for moment in figures["phases"][phase]["moments"]:
        limit, spent = _most(moment), moment["milliseconds"]
        title = f"{moment['program']}: {moment['what']}: {spent:.4f} ms from {begin:.4f} ms, limited by {limit}"
        spans.append(Span(moment["side"], COLOURS[limit], begin, spent, title))
        alike[moment["program"], moment["what"]].append(moment)
        begin += spent
    met = {span.tint for span in spans}
    yield legend((limit, tint) for limit, tint in COLOURS.items() if tint in met)
    yield time_line((HOST_SIDE, ARRAY_SIDE), spans, begin, f"Time line of a {phase}, coloured by what limits each part")
    yield details("Numbers", _sums(alike, begin))


def _sums(alike: Mapping[tuple[str, str], Sequence[Figures]], whole: float) -> Markup:
    columns = ["program", "launch", ">times", ">ms each"]
    columns += [">ms", ">share", "limit"]
    rows = []
    for (program, what), moments in alike.items():
        spent = sum(moment["milliseconds"] for moment in moments)
        each = spent / len(moments)
        shown = (f"{each:.4f}", f"{spent:.3f}", f"{spent / whole:.1%}", _most(moments[0]))
        rows.append((program, what, len(moments), *shown))
    return table(columns, rows, "Times of launches")


# traffic


def _traffic(figures: Figures) -> Iterator[Markup]:
    """Yield traffic of each phase by slot (an argument of a program), and of each program by launch."""
    yield _slots_of(figures, TOKEN)
    others = [details(phase, _slots_of(figures, phase)) for phase in figures["phases"] if phase != TOKEN]
    yield details(f"{len(others)} other phases, by slot", *others)
    programs = [details(name, _slots(program["launches"])) for name, program in figures["programs"].items()]
    yield details(f"{len(programs)} programs, one call each, by launch", *programs)


def _slots_of(figures: Figures, phase: str) -> Markup:
    calls = Counter(moment["program"] for moment in figures["phases"][phase]["moments"])
    moved: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for name, program in figures["programs"].items():
        times = calls[name] // len(program["launches"])
        for launch in program["launches"] if times else ():
            for slot, ways in launch["slots"].items():
                for at, size in enumerate(ways):
                    moved[slot][at] += times * size
    slots = sorted(moved, key=lambda slot: -sum(moved[slot]))
    columns = ["slot", ">read", ">written"]
    numbers = table(columns, [(slot, *map(amount, moved[slot])) for slot in slots], f"DDR of a {phase} by slot")
    series = [
        Series(way, f"series-{at + 1}", [moved[slot][at] / (1 << 20) for slot in slots])
        for at, way in enumerate(("read", "written"))
    ]
    return bars(slots, series, "MiB", f"What a {phase} moves to and from DDR, by slot of its programs", numbers)


def _slots(launches: Iterable[Figures]) -> Markup:
    columns = ["launch", "slot", ">read", ">written"]
    rows = (
        (launch["kernel"], slot, *map(amount, ways)) for launch in launches for slot, ways in launch["slots"].items()
    )
    return table(columns, rows, "DDR by launch and slot")


# the array

WIDTH, HEIGHT, GAP, LEFT = 94, 54, 6, 64
"""Pixels of a tile, between tiles, and before the first."""
ROWS = limits.ROWS + CORES
MEMORIES = {MEMORY: limits.L2_BYTES} | {CORES + row: limits.L1_BYTES for row in range(limits.ROWS)}
CHANNELS = {SHIM: limits.SHIM_CHANNELS, MEMORY: limits.MEMTILE_CHANNELS}


def _array(figures: Figures) -> Iterator[Markup]:
    yield note(
        f"The array has {limits.COLUMNS} columns. Each has, from below, a shim (DDR), a memory tile "
        f"({limits.L2_BYTES >> 10} KiB of L2) and {limits.ROWS} cores ({limits.L1_BYTES >> 10} KiB of L1 each, "
        f"{(limits.STACK_BYTES + limits.STATIC_BYTES) / 1024:g} KiB of it stack and static data). A tile shows how "
        "full its memory is (bar and size), the DMA "
        "channels in and out that are used, of those it has, and buffer descriptors. The compiler chooses the tiles; "
        "here they are drawn from the left."
    )
    spent: Counter[str] = Counter()
    for moment in figures["phases"][TOKEN]["moments"]:
        spent[moment["program"]] += moment["milliseconds"]
    opened = max(figures["programs"], key=lambda name: spent[name])
    programs: dict[str, Markup] = {}
    for name, program in figures["programs"].items():
        alike: dict[str, list[Figures]] = defaultdict(list)
        for launch in program["launches"]:
            alike[f"{launch['kernel']}: {launch['tiling']}"].append(launch)
        title = f"{name}: {len(program['launches'])} launches, {program['milliseconds']:.3f} ms"
        longest = max(alike.values(), key=lambda same: sum(launch["milliseconds"] for launch in same))
        shown = (_launches(same, opened=same is longest) for same in alike.values())
        programs[name] = details(title, *shown, opened=name == opened)
    yield programs.pop(opened)
    if programs:
        yield details(f"{len(programs)} other programs", *programs.values())


def _launches(launches: Sequence[Figures], opened: bool) -> Markup:
    """Return launches of one kernel and tiling, which take the same of the array for other slots."""
    first = launches[0]
    spent = sum(launch["milliseconds"] for launch in launches)
    title = f"{first['kernel']} x {len(launches)}: {spent:.4f} ms, {_most(first)}" + (
        f"; {first['tiling']}" if first["tiling"] else ""
    )
    columns = ["limit", ">taken", ">of", ">share"]
    rows = [
        (use["limit"], use["used"], use["available"], f"{use['used'] / use['available']:.0%}")
        for use in first["limits_taken"]
    ]
    herds = ", ".join(f"{columns} x {rows}" for columns, rows in first["herds"])
    return details(
        title,
        _drawing([Tile(*tile) for tile in first["tiles"]], f"The array in {first['kernel']}: herds of {herds} cores"),
        _buffers(launches),
        details("Limits", table(columns, rows, f"What {first['kernel']} takes of each limit, where it takes most")),
        opened=opened,
    )


def _buffers(launches: Sequence[Figures]) -> Markup:
    """Return a table of the buffers of launches that are alike."""
    columns = ["memory", "holds", ">bytes", ">copies"]
    rows = []
    for same in zip(*(launch["buffers"] for launch in launches), strict=True):
        first = same[0]
        slots = " or ".join(dict.fromkeys(" + ".join(buffer["slots"]) for buffer in same))
        holds = f"{slots}, {'from' if first['way'] == 'in' else 'to'} DDR" if slots else "stays in the array"
        where = "each core" if first["memory"] == "L1" else f"on {first['tiles']} memory tiles"
        rows.append((f"{first['memory']}, {where}", holds, f"{first['bytes']:,}", first["copies"]))
    return table(columns, rows, f"Buffers of {launches[0]['kernel']}")


def _drawing(tiles: Iterable[Tile], label: str) -> Markup:
    taken = {(tile.column, tile.row): tile for tile in tiles}
    places = [(column, row) for row in range(ROWS) for column in range(limits.COLUMNS)]
    shapes = [_tile(column, row, taken.get((column, row))) for column, row in places]
    names = ["shim", "memory", *(f"core {row}" for row in range(limits.ROWS))]
    titles = [tag("text", name, x=0, y=_top(row) + HEIGHT / 2, font_size=13) for row, name in enumerate(names)]
    return svg(LEFT + limits.COLUMNS * (WIDTH + GAP), ROWS * (HEIGHT + GAP), label, *titles, *shapes)


def _top(row: int) -> float:
    return (ROWS - 1 - row) * (HEIGHT + GAP) + GAP / 2


def _tile(column: int, row: int, tile: Tile | None) -> Markup:
    x, y = LEFT + column * (WIDTH + GAP), _top(row)
    box = {"x": x, "y": y, "width": WIDTH, "height": HEIGHT, "rx": 4}
    if tile is None:
        return tag("rect", **box, fill="none", stroke=colour("rule"))
    channels = CHANNELS.get(row, limits.TILE_CHANNELS)
    lines = [
        amount(tile.bytes) if row in MEMORIES else "DDR",
        f"in {tile.channels_in}/{channels} out {tile.channels_out}/{channels}",
        f"{tile.descriptors} descr.",
    ]
    texts = (tag("text", line, x=x + 5, y=y + 19 + 14 * at, font_size=12) for at, line in enumerate(lines))
    share = tile.bytes / MEMORIES[row] if row in MEMORIES else 0.0
    bar = tag("rect", x=x + 4, y=y + 3, width=f"{(WIDTH - 8) * share:.1f}", height=4, fill=colour("series-1"))
    return tag("g", tag("rect", **box, fill=colour("raised"), stroke=colour("muted")), bar, *texts)


# what was counted, rates


BY = ("estimated", "counted")


def _counted(counted: Figures) -> Iterator[Markup]:
    rows = [
        (name, launch["launch"], slot, *(f"{bytes_of[by][way]:,}" for by in BY for way in (0, 1)))
        for name, launches in counted["programs"].items()
        for launch in launches
        for slot, bytes_of in launch["slots"].items()
    ]
    differ = sum(row[3:5] != row[5:7] for row in rows)
    yield note(
        f"A prompt of {counted['prompt']} tokens and the token after it ran on npu2-sim, which counts what its "
        f"programs move. Of {len(rows)} slots of launches, {len(rows) - differ} moved exactly what the estimate says; ",
        tag("strong", f"{differ} did not.", class_="bad" if differ else "good"),
    )
    columns = ["program", "launch", ">calls", ">counted"]
    columns += [">DDR", ">counted", ">MAC counted"]
    launches = []
    for name, figures in counted["programs"].items():
        for launch in figures:
            calls = (launch["calls"][by] for by in BY)
            moved = (sum(sum(bytes_of[by]) for bytes_of in launch["slots"].values()) for by in BY)
            launches.append((name, launch["launch"], *(f"{number:,}" for number in (*calls, *moved, launch["macs"]))))
    yield table(columns, launches, "Calls of tile functions and bytes of DDR, estimated and counted, one call")
    columns = ["program", "launch", "slot", ">read"]
    columns += [f">{title}" for title in ("written", "read, counted", "written, counted")]
    yield details("By slot", table(columns, rows, "Bytes of DDR by slot, estimated and counted, one call"))


def _rates(rates: Iterable[Figures]) -> Iterator[Markup]:
    columns = ["rate", ">value", "published", "unit", "source"]
    rows = (
        (rate["name"], f"{rate['value']:g}", f"{rate['low']:g}-{rate['high']:g}", rate["unit"], rate["source"])
        for rate in rates
    )
    yield details("The rates that the times are computed from", table(columns, rows, "Rates of the machine"))
