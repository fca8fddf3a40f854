//! The comparison as text for people and as JSON for programs.

use std::fmt::Write;
use std::time::Duration;

use serde_json::{Value, json};

use super::super::{End, Figures, Foresight, Summary, TenantFigures};
use super::{Header, Result};

/// One line about what is simulated.
pub(super) fn heading(header: &Header) -> String {
    let mut text = format!("{}: {} requests, seed {}", header.scenario, header.requests, header.seed);
    // Writing to a String cannot fail.
    if let Some(load) = header.load {
        let _ = write!(text, ", load {load:.2} of {:.2} requests/s", header.capacity);
    }
    if let Some(tau) = header.tau {
        let _ = write!(text, ", scores with tau {tau:.2}");
    }
    if header.warm_up > 0.0 {
        let _ = write!(text, ", the first {:.0} % left out", header.warm_up * 100.0);
    }
    text + "\n"
}

/// What a block shows of each run.
type Block = (&'static str, fn(&Figures) -> Summary);

const BLOCKS: [Block; 3] = [
    ("TTLT, seconds to the last token", |figures| figures.ttlt),
    ("TTFT, seconds to the first token", |figures| figures.ttft),
    ("TTLT per output token, milliseconds", |figures| scaled(figures.per_token, 1e3)),
];

fn scaled(summary: Summary, factor: f64) -> Summary {
    Summary {
        count: summary.count,
        mean: summary.mean * factor,
        p50: summary.p50 * factor,
        p90: summary.p90 * factor,
        p99: summary.p99 * factor,
        p999: summary.p999 * factor,
        max: summary.max * factor,
    }
}

/// Between a policy and a tenant.
const SENDER: &str = ", ";

/// Each tenant's figures under every policy, tenant by tenant.
fn by_tenant<'a>(header: &'a Header, results: &'a [Result]) -> impl Iterator<Item = (&'a str, &'a Result, &'a TenantFigures)> {
    header.tenants.iter().enumerate().flat_map(|(id, name)| {
        results.iter().filter_map(move |result| {
            let figures = result.figures.tenants.iter().find(|figures| figures.tenant.0 as usize == id)?;
            Some((name.as_str(), result, figures))
        })
    })
}

/// Three digits that matter, whatever the size.
pub(super) fn short(value: f64) -> String {
    match value.abs() {
        0.0 => "0".into(),
        size if size >= 100.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        size if size >= 1.0 => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    }
}

/// All runs side by side.
pub(super) fn table(header: &Header, results: &[Result]) -> String {
    let names = || results.iter().map(|result| result.name.len());
    let senders = header.tenants.iter().flat_map(|tenant| names().map(|name| name + SENDER.len() + tenant.len()));
    let width = names().chain(senders).max().unwrap_or(0).max(8);
    let mut text = String::new();
    let mut row = |name: &str, cells: &[String]| {
        let _ = write!(text, "  {name:<width$}");
        for cell in cells {
            let _ = write!(text, " {cell:>9}");
        }
        text.push('\n');
    };
    let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
    for (title, block) in BLOCKS {
        row("", &[]);
        row(title, &[]);
        row("", &words(&["mean", "p50", "p90", "p99", "p99.9", "max"]));
        for result in results {
            let Summary { mean, p50, p90, p99, p999, max, .. } = block(&result.figures);
            row(&result.name, &[mean, p50, p90, p99, p999, max].map(short));
        }
    }
    row("", &[]);
    row("the rest", &[]);
    row("", &words(&["max wait", "overtaken", "B", "tokens/s", "preempted", "cached", "aged", "overload", "no answer", "Jain"]));
    for result in results {
        let figures = &result.figures;
        let waits = result.run.counters.is_some();
        let if_waits = |cell: String| if waits { cell } else { "-".into() };
        row(
            &result.name,
            &[
                if_waits(short(figures.wait.max)),
                if_waits(short(figures.overtaken)),
                if_waits(short(figures.max_overtake)),
                short(figures.tokens_per_second),
                figures.preemptions.to_string(),
                format!("{:.1} %", figures.cached * 100.0),
                if_waits(format!("{:.1} %", figures.aged * 100.0)),
                if_waits(format!("{:.1} %", figures.overloaded * 100.0)),
                figures.unanswered.to_string(),
                figures.jain.map_or("-".into(), short),
            ],
        );
    }
    if results.iter().any(|result| result.figures.foresight.is_some()) {
        row("", &[]);
        row("when it is their turn, as told while they waited", &[]);
        row("", &words(&["told", "error p50", "p90", "share p50", "p90", "bias"]));
    }
    for result in results {
        if let Some(Foresight { error, relative, bias }) = result.figures.foresight {
            let shares = [relative.p50, relative.p90].map(|share| format!("{:.0} %", share * 100.0));
            let [median, worst] = shares;
            row(&result.name, &[error.count.to_string(), short(error.p50), short(error.p90), median, worst, short(bias)]);
        }
    }
    if !header.tenants.is_empty() {
        row("", &[]);
        row("by tenant, seconds", &[]);
        row("", &words(&["TTLT mean", "p50", "p99", "TTFT mean", "p50", "p99", "answers", "no answer"]));
    }
    for (tenant, result, figures) in by_tenant(header, results) {
        let TenantFigures { ttlt, ttft, unanswered, .. } = figures;
        let mut cells = [ttlt.mean, ttlt.p50, ttlt.p99, ttft.mean, ttft.p50, ttft.p99].map(short).to_vec();
        cells.extend([ttlt.count.to_string(), unanswered.to_string()]);
        row(&format!("{}{SENDER}{tenant}", result.name), &cells);
    }
    text
}

/// Each request under every policy, in the order of the workload. Empty where there was no first token, or no whole answer.
pub(super) fn answers(results: &[Result]) -> String {
    let mut text = String::from("policy,request,arrival_s,ttft_s,ttlt_s,output_tokens\n");
    let seconds = |span: Option<Duration>| span.map_or_else(String::new, |span| format!("{:.6}", span.as_secs_f64()));
    for result in results {
        for answer in &result.run.answers {
            let whole = (answer.end == End::Answered).then(|| answer.ttlt());
            let (ttft, ttlt, arrived) = (seconds(answer.ttft()), seconds(whole), answer.arrived.as_secs_f64());
            let _ = writeln!(text, "{},{},{arrived:.6},{ttft},{ttlt},{}", result.name, answer.job, answer.output);
        }
    }
    text
}

/// Everything the table shows, and the moments of each run.
pub(super) fn json(header: &Header, results: &[Result]) -> String {
    let runs: Vec<Value> = results.iter().map(|result| one(header, result)).collect();
    let value = json!({
        "scenario": header.scenario,
        "seed": header.seed,
        "requests": header.requests,
        "load": header.load,
        "capacity_requests_per_second": header.capacity,
        "scores_tau": header.tau,
        "warm_up": header.warm_up,
        "runs": runs,
    });
    format!("{value:#}\n")
}

fn one(header: &Header, result: &Result) -> Value {
    let figures = &result.figures;
    let tenants: Vec<Value> = by_tenant(header, std::slice::from_ref(result))
        .map(|(name, _, of)| json!({ "tenant": name, "ttlt_seconds": summary(of.ttlt), "ttft_seconds": summary(of.ttft), "unanswered": of.unanswered }))
        .collect();
    let moments: Vec<Value> = result
        .run
        .moments
        .iter()
        .map(|moment| {
            json!({
                "at_seconds": moment.at.as_secs_f64(),
                "waiting": moment.waiting,
                "in_flight": moment.in_flight,
                "gamma": moment.gamma,
                "max_overtake_seconds": moment.max_overtake,
                "mode": moment.mode.map(|mode| mode.as_str()),
            })
        })
        .collect();
    json!({
        "policy": result.name,
        "gamma": result.swept,
        "ttlt_seconds": summary(figures.ttlt),
        "ttft_seconds": summary(figures.ttft),
        "ttlt_seconds_per_output_token": summary(figures.per_token),
        "wait_seconds": summary(figures.wait),
        "overtaken_seconds": figures.overtaken,
        "max_overtake_seconds": figures.max_overtake,
        "tokens_per_second": figures.tokens_per_second,
        "answers_per_second": figures.answers_per_second,
        "preemptions": figures.preemptions,
        "cached_share": figures.cached,
        "aged_share": figures.aged,
        "overloaded_share": figures.overloaded,
        "unanswered": figures.unanswered,
        "jain": figures.jain,
        "tenants": tenants,
        "foretold": figures.foresight.map(|of| json!({ "error_seconds": summary(of.error), "error_share": summary(of.relative), "bias": of.bias })),
        "request_iterations": result.run.request_iterations,
        "moments": moments,
    })
}

fn summary(summary: Summary) -> Value {
    let Summary { count, mean, p50, p90, p99, p999, max } = summary;
    json!({ "count": count, "mean": mean, "p50": p50, "p90": p90, "p99": p99, "p99.9": p999, "max": max })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_keep_three_digits_that_matter() {
        let shown = [0.0, 0.1234, 1.234, 12.34, 1234.5].map(short);
        assert_eq!(shown, ["0", "0.123", "1.23", "12.3", "1234"]);
    }
}
