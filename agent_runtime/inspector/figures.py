"""How numbers, sizes and times are written on the pages."""

from datetime import UTC, datetime

from agent_runtime.inspector.html import Html, element


def count(value: float) -> str:
    """12,345."""
    return f"{round(value):,}"


def share(part: float, whole: float) -> str:
    """87.3 %, a dash of nothing."""
    return f"{100 * part / whole:.1f} %" if whole else "–"


def size(number: float) -> str:
    """Bytes in decimal units: 449 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} TB"


def duration(ms: float | None) -> str:
    """340 ms, 2.4 s, 3 min 5 s; a dash when it is not known."""
    if ms is None:
        return "–"
    if ms < 1000:
        return f"{ms:.0f} ms"
    seconds = ms / 1000
    return f"{seconds:.1f} s" if seconds < 100 else f"{int(seconds // 60)} min {int(seconds % 60)} s"


def moment(ms: int) -> Html:
    """A time of the server's clock: of the day, with the date in the attribute."""
    at = datetime.fromtimestamp(ms / 1000, UTC).astimezone()
    exact = at.isoformat(timespec="milliseconds")
    return element("time", at.strftime("%H:%M:%S"), datetime=exact, title=str(at.date()))


def plural(number: int, one: str, many: str | None = None) -> str:
    """1 step, 2 steps."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"
