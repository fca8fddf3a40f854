"""Tables and the plot of what run.py measured."""

import statistics
from collections import Counter

# Ratios of the medians of one run: what is measured, the case, the other side, the most it may be.
GOALS = [
    ("1 KB JSON, CPU per request", "json-1k", "nginx", 1.5),
    ("1 KB JSON, CPU per request", "json-1k", "vllm-router", 0.6),
    ("64 KB JSON, CPU per request", "json-64k", "nginx", 1.7),
    ("64 KB JSON, CPU per request", "json-64k", "vllm-router", 0.4),
    ("stream without gaps, CPU per request", "sse-64", "nginx", 1.5),
    ("stream without gaps, CPU per request", "sse-64", "vllm-router", 1.0),
    ("stream 10 ms apart, CPU per chunk", "paced-64", "nginx", 1.2),
]


# With others on more of the cores than this, times say how long a process waited for a core, not what a proxy adds.
BUSY = 0.3


def median(values):
    values = list(values)
    return statistics.median(values) if values else None


class Figures:
    """Medians and spreads over repeats by case and peer."""

    def __init__(self, found):
        self.rows = {}
        self.wrong = {}
        for result in found["results"]:
            if "wrong" in result:
                self.wrong[result["case"], result["peer"]] = result["wrong"]
            else:
                self.rows.setdefault((result["case"], result["peer"]), []).append(result)

    def of(self, case, peer, value):
        return [value(row) for row in self.rows.get((case, peer), [])]

    def cpu(self, case, peer):
        return median(self.of(case, peer, lambda row: row["cpu_us"]))

    def at(self, case, peer, which, quantile):
        return median(self.of(case, peer, lambda row: row[which][quantile]))

    def failed(self, case, peer):
        total = Counter()
        for row in self.rows.get((case, peer), []):
            total.update(row["failed"])
        return total


def ratio(mine, other):
    return None if mine is None or not other else mine / other


def shown(value, digits=2, unit=""):
    return "-" if value is None else f"{value:.{digits}f}{unit}"


def sig(value):
    """Three digits."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def ms(micros):
    return "-" if micros is None else sig(micros / 1000)


def markdown(found):
    figures = Figures(found)
    names = ["direct", *found["peers"]]
    text = [f"{found['machine']['cpu']}, {found['machine']['cores']} cores, Linux {found['machine']['kernel']}.", ""]
    text += ["| peer | version | settings | RSS idle, MiB | RSS peak, MiB |", "|---|---|---|---|---|"]
    text += [f"| {name} | {about['version']} | {about['settings']} | {found['rss'][name]['idle']:.0f} | {found['rss'][name]['peak']:.0f} |" for name, about in found["peers"].items()]
    text += [f"| {name} | | left out: {why} | | |" for name, why in found["missing"].items()]
    text += ["", *overview(found, figures), "", *goals(found, figures)]
    for case in found["cases"]:
        text += ["", f"**{case['what']}** (`{case['name']}`)", ""]
        head = "| | CPU us/request (min..max) | x nginx |" + (" CPU us/chunk |" if case["chunks"] else "") + " requests/s | first byte p50, ms | p99 | last byte p50, ms | p99 | others' cores | failed |"
        text += [head, "|" + "---|" * (head.count("|") - 1)]
        for name in names:
            where = (case["name"], name)
            if where in figures.wrong:
                text.append(f"| {name} | answers wrongly: {figures.wrong[where]} |")
            if where not in figures.rows:
                continue
            cpu = figures.of(*where, lambda row: row["cpu_us"])
            cells = [name, "-", "-"]
            if name != "direct":
                cells = [name, f"{sig(median(cpu))} ({sig(min(cpu))}..{sig(max(cpu))})", shown(ratio(figures.cpu(*where), figures.cpu(case["name"], "nginx")))]
            if case["chunks"]:
                cells.append("-" if name == "direct" else sig(median(cpu) / case["chunks"]))
            cells.append(sig(median(figures.of(*where, lambda row: row["rps"]))))
            busy = any((median(figures.of(case["name"], name, lambda row: row["foreign"])) or 0) > BUSY for name in names)
            for which in ("first_us", "last_us"):
                for quantile in ("p50", "p99"):
                    if busy:
                        cells.append("busy")
                        continue
                    value, base = figures.at(*where, which, quantile), figures.at(case["name"], "direct", which, quantile)
                    cells.append(ms(value) if name == "direct" or base is None else f"+{ms(value - base)}" if value >= base else f"-{ms(base - value)}")
            cells.append(shown(median(figures.of(*where, lambda row: row["foreign"]))))
            failed = figures.failed(*where)
            cells.append("; ".join(f"{count} x {why}" for why, count in failed.items()) or "0")
            text.append("| " + " | ".join(cells) + " |")
    return "\n".join(text) + "\n"


def overview(found, figures):
    """CPU per request of everyone, a row a case."""
    names = list(found["peers"])
    text = ["| CPU of the proxy, us a request | " + " | ".join(names) + " | headway to nginx | others' cores |", "|" + "---|" * (len(names) + 3)]
    for case in found["cases"]:
        foreign = median(row["foreign"] for name in names for row in figures.rows.get((case["name"], name), []))
        cells = [sig(figures.cpu(case["name"], name)) for name in names]
        text.append(f"| {case['what']} | {' | '.join(cells)} | {shown(ratio(figures.cpu(case['name'], 'headway'), figures.cpu(case['name'], 'nginx')), 2, ' x')} | {shown(foreign)} |")
    return text


def goals(found, figures):
    rows = [(what, f"{case}, {other}", ratio(figures.cpu(case, "headway"), figures.cpu(case, other)), most) for what, case, other, most in GOALS]
    for other, most in (("smg", 0.5), ("litellm", 0.05)):
        every = [(ratio(figures.cpu(case["name"], "headway"), figures.cpu(case["name"], other)), case["name"]) for case in found["cases"] if case["rate"] == 0]
        every = [pair for pair in every if pair[0] is not None]
        if every:
            worst, where = max(every)
            rows.append(("every closed case, CPU per request", f"{other}; the worst is {where}", worst, most))
    for case in ("open-json", "open-sse"):
        for quantile in ("p50", "p99"):
            base = figures.at(case, "direct", "last_us", quantile)
            values = [figures.at(case, name, "last_us", quantile) for name in ("headway", "nginx")]
            if any((median(figures.of(case, name, lambda row: row["foreign"])) or 0) > BUSY for name in ("direct", "headway", "nginx")):
                rows.append((f"{case}, added to the last byte, {quantile}", "nginx; not measured: other programs kept the cores busy", None, 1.5))
            elif base is not None and None not in values:
                mine, other = (value - base for value in values)
                rows.append((f"{case}, added to the last byte, {quantile}", "nginx", ratio(mine, other) if other > 0 else None, 1.5))
    text = ["| goal | beside | measured | at most | met |", "|---|---|---|---|---|"]
    for what, other, value, most in rows:
        met = "" if value is None else "yes" if value <= most else "**no**"
        text.append(f"| {what} | {other} | {shown(value, 3 if most < 0.1 else 2, '' if value is None else ' x')} | {most} x | {met} |")
    if "headway" in found["rss"]:
        idle = found["rss"]["headway"]["idle"]
        text.append(f"| RSS after start, without the ranker | | {idle:.0f} MiB | 40 MB | {'yes' if idle * 1.048576 < 40 else '**no**'} |")
    return text


def scale(found):
    by_name = {}
    for result in found["scale"]:
        by_name.setdefault(result["peer"], []).append(result)
    base = None
    text = ["| Headway with | CPU us/request (min..max) | to plain | RSS idle, MiB | after the load, MiB | failed |", "|---|---|---|---|---|---|"]
    for name, rows in by_name.items():
        cpu = [row["cpu_us"] for row in rows]
        base = base or median(cpu)
        failed = sum(sum(row["failed"].values()) for row in rows)
        text.append(f"| {name} | {median(cpu):.1f} ({min(cpu):.1f}..{max(cpu):.1f}) | {median(cpu) - base:+.1f} us | {rows[0]['rss_idle']:.0f} | {rows[-1]['rss_mib']:.0f} | {failed} |")
    return "\n".join(text) + "\n"


COLOURS = {"nginx": "#4b7f52", "envoy": "#7a5ea8", "smg": "#c9822b", "vllm-router": "#3d7ea6", "litellm": "#8a8a8a", "headway": "#c0392b"}


def svg(found):
    """CPU per request of every peer, a group a case, on a logarithmic scale."""
    from math import log10

    figures = Figures(found)
    names = list(found["peers"])
    bars = [(case, [(name, figures.cpu(case["name"], name)) for name in names]) for case in found["cases"] if case["rate"] == 0]
    values = [value for _, group in bars for _, value in group if value]
    if not values:
        return '<svg xmlns="http://www.w3.org/2000/svg"/>\n'
    low, high = 10 ** int(log10(min(values))), 10 ** (int(log10(max(values))) + 1)
    left, width, row = 330, 560, 13
    x = lambda value: left + width * (log10(value) - log10(low)) / (log10(high) - log10(low))
    body, y = [], 54
    for case, group in bars:
        group = [(name, value) for name, value in group if value]
        body.append(f'<text x="{left - 10}" y="{y + len(group) * row / 2 + 4:.0f}" text-anchor="end">{case["what"]}</text>')
        for name, value in group:
            body.append(f'<rect x="{left}" y="{y}" width="{x(value) - left:.1f}" height="{row - 2}" fill="{COLOURS[name]}"/>')
            body.append(f'<text x="{x(value) + 4:.1f}" y="{y + row - 3}" font-size="10">{sig(value)}</text>')
            y += row
        y += 12
    grid, value = [], low
    while value <= high:
        grid.append(f'<line x1="{x(value):.1f}" x2="{x(value):.1f}" y1="46" y2="{y}" stroke="#ddd"/><text x="{x(value):.1f}" y="42" text-anchor="middle" font-size="10">{value:,}</text>')
        value *= 10
    legend = "".join(f'<rect x="{left + at * 92}" y="10" width="10" height="10" fill="{COLOURS[name]}"/><text x="{left + at * 92 + 14}" y="19">{name}</text>' for at, name in enumerate(names))
    title = f'<text x="{left - 10}" y="19" text-anchor="end" font-weight="bold">CPU of the proxy, us a request</text>'
    style = 'font-family="sans-serif" font-size="12"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 60}" height="{y + 6}" {style}><rect width="100%" height="100%" fill="#fff"/>{title}{legend}{"".join(grid)}{"".join(body)}</svg>\n'
