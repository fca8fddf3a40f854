//! Line and point charts as SVG text: no script, nothing loaded from elsewhere.

use std::fmt::Write;

/// A chart of a fixed size.
pub(super) struct Chart<'a> {
    pub title: &'a str,
    pub x: Axis<'a>,
    pub y: Axis<'a>,
    pub series: Vec<Series>,
}

/// What one axis shows.
#[derive(Clone, Copy)]
pub(super) struct Axis<'a> {
    pub label: &'a str,
    /// Powers of ten at equal distances. Values that are not positive are left out.
    pub log: bool,
}

/// Points of one colour.
pub(super) struct Series {
    pub name: String,
    /// Which colour of the page.
    pub colour: usize,
    pub points: Vec<(f64, f64)>,
    /// Joined by a line; otherwise each point is a dot with the name beside it.
    pub line: bool,
}

const WIDTH: f64 = 560.0;
const HEIGHT: f64 = 320.0;
/// Room for labels: left, top, right, bottom.
const MARGIN: (f64, f64, f64, f64) = (58.0, 30.0, 14.0, 42.0);

/// From values to places along an axis.
struct Scale {
    low: f64,
    high: f64,
    log: bool,
    from: f64,
    to: f64,
}

impl Scale {
    fn new(axis: Axis, values: impl Iterator<Item = f64>, from: f64, to: f64) -> Self {
        let values = values.filter(|value| value.is_finite() && (!axis.log || *value > 0.0));
        let (mut low, mut high) = values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| (low.min(value), high.max(value)));
        if low > high {
            (low, high) = if axis.log { (1.0, 10.0) } else { (0.0, 1.0) };
        }
        if axis.log {
            (low, high) = (10f64.powf(low.log10().floor()), 10f64.powf(high.log10().ceil()));
            if low == high {
                high = low * 10.0;
            }
        } else {
            low = low.min(0.0);
            high = if high > low { high } else { low + 1.0 };
        }
        Scale { low, high, log: axis.log, from, to }
    }

    fn place(&self, value: f64) -> Option<f64> {
        let share = if self.log {
            if value <= 0.0 {
                return None;
            }
            (value / self.low).log10() / (self.high / self.low).log10()
        } else {
            (value - self.low) / (self.high - self.low)
        };
        share.is_finite().then(|| self.from + share.clamp(0.0, 1.0) * (self.to - self.from))
    }

    fn ticks(&self) -> Vec<f64> {
        if self.log {
            let decades = (self.high / self.low).log10().round() as i32;
            return (0..=decades).map(|decade| self.low * 10f64.powi(decade)).collect();
        }
        let rough = (self.high - self.low) / 5.0;
        let unit = 10f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0].into_iter().map(|factor| factor * unit).find(|step| *step >= rough).unwrap_or(rough);
        let first = (self.low / step).ceil() as i64;
        (first..).map(|n| n as f64 * step).take_while(|tick| *tick <= self.high * (1.0 + 1e-9)).take(20).collect()
    }
}

impl Chart<'_> {
    /// The chart as an `svg` element. Colours are the classes `c0` to `c9`, which the page defines.
    pub fn svg(&self) -> String {
        let (left, top, right, bottom) = MARGIN;
        let all = || self.series.iter().flat_map(|series| &series.points);
        let x = Scale::new(self.x, all().map(|point| point.0), left, WIDTH - right);
        let y = Scale::new(self.y, all().map(|point| point.1), HEIGHT - bottom, top);
        // Writing to a String cannot fail.
        let mut out = format!(
            r#"<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img"><title>{0}</title><text class="h" x="{left}" y="18">{0}</text>"#,
            escape(self.title)
        );
        for tick in x.ticks() {
            let Some(at) = x.place(tick) else { continue };
            let _ = write!(
                out,
                r#"<path class="g" d="M{at:.1} {top}V{:.1}"/><text class="t m" x="{at:.1}" y="{:.1}">{}</text>"#,
                HEIGHT - bottom,
                HEIGHT - bottom + 15.0,
                tick_label(tick)
            );
        }
        for tick in y.ticks() {
            let Some(at) = y.place(tick) else { continue };
            let _ = write!(
                out,
                r#"<path class="g" d="M{left} {at:.1}H{:.1}"/><text class="t e" x="{:.1}" y="{:.1}">{}</text>"#,
                WIDTH - right,
                left - 5.0,
                at + 4.0,
                tick_label(tick)
            );
        }
        let _ = write!(out, r#"<text class="t m" x="{:.1}" y="{:.1}">{}</text>"#, (left + WIDTH - right) / 2.0, HEIGHT - 8.0, escape(self.x.label));
        let _ = write!(
            out,
            r#"<text class="t m" transform="translate(13 {:.1}) rotate(-90)">{}</text>"#,
            (top + HEIGHT - bottom) / 2.0,
            escape(self.y.label)
        );
        for series in &self.series {
            let places = series.points.iter().filter_map(|point| Some((x.place(point.0)?, y.place(point.1)?)));
            let (colour, name) = (series.colour % COLOURS.len(), escape(&series.name));
            if series.line {
                let path: Vec<String> = places.map(|(x, y)| format!("{x:.1} {y:.1}")).collect();
                let _ = write!(out, r#"<polyline class="l c{colour}" points="{}"><title>{name}</title></polyline>"#, path.join(" "));
            } else {
                for (x, y) in places {
                    // To the left of what stands near the right edge.
                    let (class, shift) = if x > WIDTH - 110.0 { ("e", -7.0) } else { ("", 7.0) };
                    let _ = write!(
                        out,
                        r#"<circle class="c{colour}" cx="{x:.1}" cy="{y:.1}" r="4"/><text class="t {class}" x="{:.1}" y="{:.1}">{name}</text>"#,
                        x + shift,
                        y - 5.0
                    );
                }
            }
        }
        out + "</svg>"
    }
}

/// The colours of series, told apart by people who see few of them (Okabe and Ito), with grey and brown added.
pub(super) const COLOURS: [&str; 10] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#8c564b", "#b8a600", "#6a3d9a"];

fn tick_label(value: f64) -> String {
    let size = value.abs();
    if size >= 1e6 || size > 0.0 && size < 1e-3 {
        format!("{value:.0e}")
    } else {
        // As many digits as it takes, but no noise of binary fractions.
        let text = format!("{value:.4}");
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    }
}

/// Text that can stand in HTML.
pub(super) fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINEAR: Axis = Axis { label: "x", log: false };
    const LOG: Axis = Axis { label: "y", log: true };

    #[test]
    fn scales_put_values_between_round_ends() {
        let log = Scale::new(LOG, [0.0, 3.0, 250.0].into_iter(), 0.0, 300.0);
        assert_eq!((log.low, log.high, log.place(10.0), log.place(0.0)), (1.0, 1000.0, Some(100.0), None));
        assert_eq!(log.ticks(), [1.0, 10.0, 100.0, 1000.0]);
        let linear = Scale::new(LINEAR, [5.0, 12.0].into_iter(), 0.0, 120.0);
        assert_eq!((linear.place(6.0), linear.ticks()), (Some(60.0), vec![0.0, 5.0, 10.0]));
        assert!(Scale::new(LINEAR, std::iter::empty(), 0.0, 1.0).place(0.5).is_some());
    }

    #[test]
    fn a_chart_is_whole_and_escapes_names() {
        let series = |name: &str, line| Series { name: name.into(), colour: 1, points: vec![(1.0, 2.0), (f64::NAN, 1.0), (3.0, 0.0)], line };
        let svg = Chart { title: "a < b", x: LINEAR, y: LOG, series: vec![series("one", true), series("<two>", false)] }.svg();
        assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>") && svg.contains("a &lt; b") && svg.contains("&lt;two&gt;"), "{svg}");
        assert!(!svg.contains("NaN") && svg.matches("<circle").count() == 1, "{svg}");
    }
}
