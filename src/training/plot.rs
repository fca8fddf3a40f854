//! The table of an evaluation as a drawing.

use std::fmt::Write;

use super::evaluate::Line;

/// Sizes in pixels.
const NAMES: f64 = 360.0;
const AXIS: f64 = 460.0;
const ROW: f64 = 20.0;
const TOP: f64 = 56.0;

/// An SVG: per line of the table a dot with its interval, what prompt length says as a hollow dot and the ceiling as a bar.
pub(super) fn svg(lines: &[Line]) -> String {
    let values = lines.iter().flat_map(|line| [line.interval.0, line.prompt_length]);
    // The axis begins at zero unless something lies below it, and ends at one.
    let least = (values.fold(0.0, f64::min) * 10.0).floor() / 10.0;
    let x = |value: f64| NAMES + (value - least) / (1.0 - least) * AXIS;
    let (width, height) = (NAMES + AXIS + 30.0, TOP + ROW * lines.len() as f64 + 20.0);
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = writeln!(
        out,
        r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" font-family="sans-serif" font-size="12">
<rect width="100%" height="100%" fill="#fff"/>
<text x="10" y="20" font-size="14">Kendall's tau-b of scores and answer lengths</text>
<g fill="#555"><circle cx="16" cy="38" r="4" fill="#0b62a4"/><text x="26" y="42">ranker, 95 %</text><circle cx="126" cy="38" r="3.5" fill="none" stroke="#888"/><text x="136" y="42">prompt length</text><path d="M236 32v12" stroke="#b03a2e" stroke-width="2"/><text x="244" y="42">true lengths of another model</text></g>"##
    );
    let ticks = ((1.0 - least) * 10.0).round() as usize;
    for tick in (0..=ticks).filter(|tick| (ticks - tick).is_multiple_of(2)) {
        let value = least + tick as f64 / 10.0;
        let (at, bottom) = (x(value), height - 14.0);
        let _ = writeln!(
            out,
            r##"<path d="M{at:.1} {:.1}V{bottom:.1}" stroke="#ddd"/><text x="{at:.1}" y="{:.1}" text-anchor="middle" fill="#555">{value:.1}</text>"##,
            TOP - 4.0,
            height - 2.0
        );
    }
    for (index, line) in lines.iter().enumerate() {
        let y = TOP + ROW * (index as f64 + 0.5);
        let name = escape(&format!("{} · {} ({})", line.source, line.model, line.prompts));
        let (low, high, tau, naive) = (x(line.interval.0), x(line.interval.1), x(line.tau), x(line.prompt_length));
        let _ = writeln!(
            out,
            r##"<text x="{:.1}" y="{:.1}" text-anchor="end">{name}</text><path d="M{low:.1} {y:.1}H{high:.1}" stroke="#0b62a4"/><circle cx="{tau:.1}" cy="{y:.1}" r="4" fill="#0b62a4"/><circle cx="{naive:.1}" cy="{y:.1}" r="3.5" fill="none" stroke="#888"/>"##,
            NAMES - 10.0,
            y + 4.0
        );
        if let Some(ceiling) = line.ceiling {
            let _ = writeln!(out, r##"<path d="M{:.1} {:.1}v12" stroke="#b03a2e" stroke-width="2"/>"##, x(ceiling), y - 6.0);
        }
    }
    out + "</svg>\n"
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(model: &str, tau: f64, ceiling: Option<f64>) -> Line {
        Line { source: "s".into(), model: model.into(), prompts: 30, tau, interval: (tau - 0.1, tau + 0.1), pairs: 0.7, prompt_length: 0.1, ceiling }
    }

    #[test]
    fn every_line_is_drawn_where_its_figures_say() {
        let svg = svg(&[line("a<b>&c", 0.5, Some(0.8)), line("d", 0.25, None)]);
        assert!(svg.contains("s · a&lt;b&gt;&amp;c (30)"), "{svg}");
        let centre = |value: f64| format!(r#"cx="{:.1}""#, NAMES + value * AXIS);
        assert!([0.5, 0.25].iter().all(|tau| svg.contains(&centre(*tau))), "{svg}");
        assert_eq!(svg.matches(r##"v12" stroke="#b03a2e""##).count(), 1 + 1, "one in the legend, one of the first line");
        assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
    }

    #[test]
    fn an_axis_with_negative_values_begins_below_zero() {
        let svg = svg(&[line("a", -0.35, None)]);
        let at = |value: f64| format!(r#"cx="{:.1}""#, NAMES + (value + 0.5) / 1.5 * AXIS);
        assert!(svg.contains(&at(-0.35)) && svg.contains(&at(0.1)), "{svg}");
        assert!(svg.contains(">-0.4<") && svg.contains(">0.0<"), "{svg}");
    }
}
