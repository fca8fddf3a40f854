//! The comparison as one HTML page with its charts, for a browser without a network.

use std::collections::BTreeMap;
use std::fmt::Write;

use super::chart::{Axis, COLOURS, Chart, Series, escape};
use super::table::{heading, table};
use super::{Header, Result};

const STYLE: &str = "body{font:15px/1.5 system-ui,sans-serif;max-width:1180px;margin:2em auto;padding:0 1em;color:#222;background:#fff}\
pre{overflow-x:auto;font-size:13px;line-height:1.35}svg{width:100%;height:auto}\
main{display:grid;grid-template-columns:repeat(auto-fit,minmax(440px,1fr));gap:1em}\
.h{font-size:13px;font-weight:600}.t{font-size:11px}.m{text-anchor:middle}.e{text-anchor:end}text{fill:#222}\
.g{stroke:#ddd;fill:none}.l{fill:none;stroke-width:1.7}.k{white-space:nowrap;margin-right:1.2em}.k:before{content:'\\25cf';margin-right:.3em;color:var(--c)}\
@media(prefers-color-scheme:dark){body{background:#16181c;color:#ddd}text{fill:#ddd}.g{stroke:#333}}";

/// How many points of a distribution are drawn.
const POINTS: usize = 300;

/// The whole page.
pub(super) fn page(header: &Header, results: &[Result]) -> String {
    let colours = colours(results);
    let colour = |result: &Result| colours.get(result.name.as_str()).copied().unwrap_or(0);
    let compared = || results.iter().filter(|result| result.swept.is_none());
    let lines = |points: &dyn Fn(&Result) -> Vec<(f64, f64)>| -> Vec<Series> {
        compared().map(|result| Series { name: result.name.clone(), colour: colour(result), points: points(result), line: true }).collect()
    };
    let seconds = |label, log| Axis { label, log };
    let share = Axis { label: "share of answers", log: false };
    let mut charts = vec![
        Chart {
            title: "TTLT: how many answers are complete within",
            x: seconds("seconds", true),
            y: share,
            series: lines(&|result| distribution(result.run.whole(header.warm_up).map(|answer| answer.ttlt().as_secs_f64()))),
        },
        Chart {
            title: "TTFT: how many answers have begun within",
            x: seconds("seconds", true),
            y: share,
            series: lines(&|result| distribution(result.run.whole(header.warm_up).filter_map(|answer| Some(answer.ttft()?.as_secs_f64())))),
        },
        Chart {
            title: "Waiting in the gateway",
            x: seconds("seconds since the start", false),
            y: Axis { label: "requests", log: false },
            series: moments(results, &colours, |moment| f64::from(moment.waiting)),
        },
        Chart {
            title: "gamma, the decay rate of the boost",
            x: seconds("seconds since the start", false),
            y: Axis { label: "1/s", log: true },
            series: moments(results, &colours, |moment| moment.gamma),
        },
        Chart {
            title: "Mean against tail",
            x: seconds("mean TTLT, seconds", false),
            y: Axis { label: "p99 TTLT, seconds", log: false },
            series: front(results, &colours),
        },
    ];
    charts.retain(|chart| chart.series.iter().any(|series| !series.points.is_empty()));

    // Writing to a String cannot fail.
    let mut out = format!("<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><title>{}</title><style>{STYLE}", escape(&header.scenario));
    for (index, colour) in COLOURS.iter().enumerate() {
        let _ = write!(out, ".l.c{index}{{stroke:{colour}}}circle.c{index}{{fill:{colour}}}");
    }
    let _ = write!(out, "</style><h1>{}</h1><p>{}</p><p>", escape(&header.scenario), escape(&heading(header)));
    for result in compared() {
        let _ = write!(out, "<span class=\"k\" style=\"--c:{}\">{}</span> ", COLOURS[colour(result) % COLOURS.len()], escape(&result.name));
    }
    out.push_str("</p><main>");
    for chart in &charts {
        let _ = write!(out, "<figure>{}</figure>", chart.svg());
    }
    let _ = writeln!(out, "</main><pre>{}</pre></html>", escape(&table(header, results)));
    out
}

/// A colour for each policy, the last one for the sweep.
fn colours(results: &[Result]) -> BTreeMap<&str, usize> {
    results.iter().filter(|result| result.swept.is_none()).enumerate().map(|(index, result)| (result.name.as_str(), index)).collect()
}

/// Values against the share that is no larger, at about equal steps of the share.
fn distribution(values: impl Iterator<Item = f64>) -> Vec<(f64, f64)> {
    let mut values: Vec<f64> = values.collect();
    values.sort_unstable_by(f64::total_cmp);
    let n = values.len();
    let steps = POINTS.min(n);
    (1..=steps).map(|step| n * step / steps).map(|rank| (values[rank - 1], rank as f64 / n as f64)).collect()
}

/// One quantity over time, of the policies that wait in the gateway.
fn moments(results: &[Result], colours: &BTreeMap<&str, usize>, value: impl Fn(&super::super::Moment) -> f64) -> Vec<Series> {
    let waits = results.iter().filter(|result| result.swept.is_none() && result.run.counters.is_some());
    waits
        .map(|result| Series {
            name: result.name.clone(),
            colour: colours.get(result.name.as_str()).copied().unwrap_or(0),
            points: result.run.moments.iter().map(|moment| (moment.at.as_secs_f64(), value(moment))).collect(),
            line: true,
        })
        .collect()
}

/// Each policy as a point, and the sweep of gamma as a line with its own points.
fn front(results: &[Result], colours: &BTreeMap<&str, usize>) -> Vec<Series> {
    let place = |result: &Result| (result.figures.ttlt.mean, result.figures.ttlt.p99);
    let sweep: Vec<&Result> = results.iter().filter(|result| result.swept.is_some()).collect();
    let grey = COLOURS.len() - 4;
    let mut series =
        vec![Series { name: "headway at fixed gamma".into(), colour: grey, points: sweep.iter().map(|result| place(result)).collect(), line: true }];
    for result in &sweep {
        let name = result.swept.map_or_else(String::new, |gamma| gamma.to_string());
        series.push(Series { name, colour: grey, points: vec![place(result)], line: false });
    }
    for result in results.iter().filter(|result| result.swept.is_none()) {
        let colour = colours.get(result.name.as_str()).copied().unwrap_or(0);
        series.push(Series { name: result.name.clone(), colour, points: vec![place(result)], line: false });
    }
    series
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_distribution_ends_at_one() {
        let points = distribution((1..=1000).map(f64::from));
        assert_eq!((points.len(), points[0].0, points[POINTS - 1]), (POINTS, 3.0, (1000.0, 1.0)));
        assert!(points.is_sorted_by(|a, b| a.0 <= b.0 && a.1 < b.1));
        assert!(distribution(std::iter::empty()).is_empty());
    }
}
