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


def scale_svg(found):
    """CPU per request by how many backends, pools and tenants there are."""
    cpu, plain = {}, None
    for result in found["scale"]:
        plain = plain or result["peer"]
        cpu.setdefault(result["peer"], []).append(result["cpu_us"])
    series = []
    for what in ("backends", "pools", "tenants"):
        points = [(int(name.split(" ")[0].replace(",", "")), median(values)) for name, values in cpu.items() if name.split(" ")[-1].removesuffix("s") == what.removesuffix("s")]
        # Without keys there is no tenant.
        series.append((what, sorted(points if what == "tenants" else [(1, median(cpu[plain])), *points])))
    return growth("of them", [("CPU, us a request", series)])


LINES = ["#c0392b", "#3d7ea6", "#4b7f52"]


def growth(unit, panels):
    """Panels side by side: lines over a logarithmic count. A panel is its title and its lines, a line its name and its points."""
    from math import log10

    width, height, left, top, gap = 300, 200, 50, 40, 90
    text = []
    for at, (title, lines) in enumerate(panels):
        x0 = left + at * (width + gap)
        counts = [count for _, points in lines for count, _ in points]
        most = max(value for _, points in lines for _, value in points) * 1.1 or 1
        low, high = int(log10(min(counts))), max(log10(max(counts)), int(log10(min(counts))) + 1)
        x = lambda count: x0 + width * (log10(count) - low) / (high - low)
        y = lambda value: top + height * (1 - value / most)
        text.append(f'<text x="{x0}" y="18" font-weight="bold">{title}</text>')
        step = 10 ** int(log10(most)) / (1 if most >= 5 * 10 ** int(log10(most)) else 2 if most >= 2 * 10 ** int(log10(most)) else 5)
        value = 0.0
        while value <= most:
            text.append(f'<line x1="{x0}" x2="{x0 + width}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="#ddd"/><text x="{x0 - 6}" y="{y(value) + 4:.1f}" text-anchor="end" font-size="10">{value:g}</text>')
            value += step
        for power in range(low, int(high) + 1):
            text.append(f'<text x="{x(10**power):.1f}" y="{top + height + 16}" text-anchor="middle" font-size="10">{10**power:,}</text>')
        text.append(f'<text x="{x0 + width}" y="{top + height + 32}" text-anchor="end" font-size="10">{unit}</text>')
        for colour, (name, points) in zip(LINES, lines):
            path = " ".join(f"{x(count):.1f},{y(value):.1f}" for count, value in points)
            text.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
            text += [f'<circle cx="{x(count):.1f}" cy="{y(value):.1f}" r="3" fill="{colour}"/>' for count, value in points]
        text += [f'<text x="{x0 + width - 8}" y="{top + height - 12 - 16 * nth}" text-anchor="end" fill="{colour}">{name}</text>' for nth, (colour, (name, _)) in enumerate(zip(LINES, lines))]
    style = 'font-family="sans-serif" font-size="12"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + len(panels) * (width + gap) - gap + 30}" height="{top + height + 42}" {style}><rect width="100%" height="100%" fill="#fff"/>{"".join(text)}</svg>\n'


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
