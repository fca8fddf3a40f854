//! How fast engines are, by the streams that they gave: what a replay needs to know of them, and no engine tells.
//!
//! The time between two tokens of a stream is what an iteration took on average: a base, something for each request that was decoded meanwhile, and something for
//! each prompt token that was computed meanwhile. The three come out by least squares over all streams.

use crate::engine::Timing;

/// Streams that it takes to say something.
pub(super) const ENOUGH: usize = 30;
/// Answers of fewer tokens say nothing about the time between two.
const SHORTEST: u32 = 8;
/// One request's stay at an engine, in seconds on one clock.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stay {
    pub released: f64,
    /// `None` for one that was not streamed, or never got so far.
    pub first: Option<f64>,
    pub ended: f64,
    pub prompt: u32,
    pub output: u32,
}

/// How many there were at each moment.
struct Crowd {
    /// Moment, how many from then on, and their sum over time until then.
    steps: Vec<(f64, f64, f64)>,
}

impl Crowd {
    fn of(spans: impl Iterator<Item = (f64, f64)>) -> Crowd {
        let mut changes: Vec<(f64, f64)> = spans.flat_map(|(from, to)| [(from, 1.0), (to, -1.0)]).collect();
        // Who ends at the moment that another begins was not there together with it.
        changes.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1)));
        let (mut many, mut area, mut last) = (0.0, 0.0, changes.first().map_or(0.0, |change| change.0));
        let steps = changes.into_iter().map(|(moment, change)| {
            area += many * (moment - last);
            (many, last) = (many + change, moment);
            (moment, many, area)
        });
        Crowd { steps: steps.collect() }
    }

    fn peak(&self) -> u32 {
        self.steps.iter().map(|(_, many, _)| *many as u32).max().unwrap_or(0)
    }

    /// The mean between two moments.
    fn mean(&self, from: f64, to: f64) -> f64 {
        let until = |moment: f64| match self.steps.partition_point(|step| step.0 <= moment) {
            0 => 0.0,
            next => {
                let (since, many, area) = self.steps[next - 1];
                area + many * (moment - since)
            }
        };
        if to > from { (until(to) - until(from)) / (to - from) } else { 0.0 }
    }
}

/// Those that decode: from the first token on, where that is known.
fn decoding(stays: &[Stay]) -> Crowd {
    Crowd::of(stays.iter().map(|stay| (stay.first.unwrap_or(stay.released), stay.ended)))
}

/// How many an engine may have been given at once, and how many of them it ran at once: fewer, where some waited inside.
pub(super) fn room(stays: &[Stay], window: u32) -> (u32, u32) {
    let given = Crowd::of(stays.iter().map(|stay| (stay.released, stay.ended))).peak();
    let (slots, ran) = (given.max(window).max(1), decoding(stays).peak());
    // One may be about to get its first token.
    (slots, if given > ran + 1 && ran > 0 { ran } else { slots })
}

/// One stream: requests decoded and prompt tokens computed for each of its tokens meanwhile, seconds between two tokens, and how many tokens.
struct Stream {
    decoded: f64,
    computed: f64,
    between: f64,
    tokens: f64,
}

/// The timing of an engine that gave these streams, and how many of them it is read from; `None` if they are too few.
pub(super) fn timing(stays: &[Stay]) -> Option<(Timing, usize)> {
    let crowd = decoding(stays);
    // Prompts by when they were computed, and the sum of those before.
    let mut prompts: Vec<(f64, f64)> = stays.iter().map(|stay| (stay.first.unwrap_or(stay.released), f64::from(stay.prompt))).collect();
    prompts.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut sum = 0.0;
    for (_, prompt) in &mut prompts {
        sum += *prompt;
        *prompt = sum;
    }
    let until = |moment: f64| match prompts.partition_point(|(computed, _)| *computed <= moment) {
        0 => 0.0,
        next => prompts[next - 1].1,
    };
    let streams: Vec<Stream> = stays
        .iter()
        .filter(|stay| stay.output >= SHORTEST)
        .filter_map(|stay| {
            let first = stay.first.filter(|first| stay.ended > *first)?;
            let tokens = f64::from(stay.output - 1);
            let (decoded, computed) = (crowd.mean(first, stay.ended), (until(stay.ended) - until(first)) / tokens);
            Some(Stream { decoded, computed, between: (stay.ended - first) / tokens, tokens })
        })
        .collect();
    if streams.len() < ENOUGH {
        return None;
    }
    let per_prefill_token = per_prefill_token(&streams).clamp(0.0, longest_prefill(stays));
    let (base, per_sequence) = line(&streams, per_prefill_token);
    Some((Timing { base, per_sequence, per_prefill_token, per_kv_token: 0.0 }, streams.len()))
}

/// What no prompt token can take longer than: a quarter of the longest prompts had their first token sooner than that.
fn longest_prefill(stays: &[Stay]) -> f64 {
    let mut all: Vec<(u32, f64)> = stays.iter().filter_map(|stay| Some((stay.prompt.max(1), stay.first? - stay.released))).collect();
    all.sort_by_key(|(prompt, _)| std::cmp::Reverse(*prompt));
    all.truncate(all.len().div_ceil(4));
    let mut each: Vec<f64> = all.into_iter().map(|(prompt, took)| took.max(0.0) / f64::from(prompt)).collect();
    each.sort_by(f64::total_cmp);
    each.get(each.len() / 4).copied().unwrap_or(0.0)
}

/// The third of the coefficients in `between = base + a * decoded + b * computed`, by least squares: with what the other two explain taken out of both.
fn per_prefill_token(streams: &[Stream]) -> f64 {
    let weight: f64 = streams.iter().map(|stream| stream.tokens).sum();
    let mean = |of: fn(&Stream) -> f64| streams.iter().map(|stream| of(stream) * stream.tokens).sum::<f64>() / weight;
    let (x, z, y) = (mean(|stream| stream.decoded), mean(|stream| stream.computed), mean(|stream| stream.between));
    let [mut xx, mut xz, mut zz, mut xy, mut zy] = [0.0; 5];
    for stream in streams {
        let (dx, dz, dy, w) = (stream.decoded - x, stream.computed - z, stream.between - y, stream.tokens);
        xx += w * dx * dx;
        xz += w * dx * dz;
        zz += w * dz * dz;
        xy += w * dx * dy;
        zy += w * dz * dy;
    }
    let together = if xx > 0.0 { xz / xx } else { 0.0 };
    let alone = zz - together * xz;
    if alone > 1e-9 * zz { (zy - together * xy) / alone } else { 0.0 }
}

/// Base and slope of what is left once prompts are paid for, by least squares: neither falling nor below zero.
fn line(streams: &[Stream], per_prefill_token: f64) -> (f64, f64) {
    let weight: f64 = streams.iter().map(|stream| stream.tokens).sum();
    let left = |stream: &Stream| (stream.between - per_prefill_token * stream.computed).max(0.0);
    let x = streams.iter().map(|stream| stream.decoded * stream.tokens).sum::<f64>() / weight;
    let y = streams.iter().map(|stream| left(stream) * stream.tokens).sum::<f64>() / weight;
    let spread: f64 = streams.iter().map(|stream| stream.tokens * (stream.decoded - x).powi(2)).sum();
    let together: f64 = streams.iter().map(|stream| stream.tokens * (stream.decoded - x) * (left(stream) - y)).sum();
    let steepest = if x > 0.0 { y / x } else { 0.0 };
    let slope = if spread > 0.0 { (together / spread).clamp(0.0, steepest) } else { 0.0 };
    (y - slope * x, slope)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::Profile;
    use crate::scheduler::Slots;
    use crate::simulator::{Arrivals, Dispatch, Length, Member, Part, Setup, Workload, run};

    /// An engine with a known timing, its streams, and what is read from them.
    #[test]
    fn an_engine_is_known_by_its_streams() {
        let profile = Profile { max_num_seqs: 32, ..Profile::medium() };
        let lengths = |median| Length::LogNormal { parts: vec![Part { share: 1.0, median, sigma: 0.8 }], longest: 2000 };
        let mut workload = Workload::draw(1500, Arrivals::Poisson, &lengths(400.0), &lengths(150.0), 3);
        workload.pace(6.0);
        let fleet = vec![Member { slots: Slots::Fixed(32), ..Member::new(profile) }];
        let answers = run(&Setup::new(fleet, Dispatch::RoundRobin), &workload, 1).unwrap().answers;
        let stays: Vec<Stay> = answers
            .iter()
            .map(|answer| Stay {
                released: answer.released.unwrap().as_secs_f64(),
                first: answer.first.map(|first| first.as_secs_f64()),
                ended: answer.ended.as_secs_f64(),
                prompt: workload.jobs[answer.job as usize].prompt,
                output: answer.output,
            })
            .collect();
        let (read, streams) = timing(&stays).unwrap();
        assert!(streams > 1400);
        assert_eq!(room(&stays, 8), (43, 32), "nothing was kept back, and it runs 32 at once");
        // An iteration with twelve requests, no prompt among them, and with one of 400 tokens.
        let kv = 12 * 600;
        for prompt in [0, 400] {
            let (real, read) = (profile.timing.iteration(12, prompt, kv), read.iteration(12, prompt, kv));
            let ratio = read.as_secs_f64() / real.as_secs_f64();
            assert!((0.85..1.15).contains(&ratio), "{read:?} for {real:?} with a prompt of {prompt} tokens");
        }
        assert!(timing(&stays[..ENOUGH - 1]).is_none());
    }

    #[test]
    fn a_crowd_is_counted_over_time() {
        let crowd = Crowd::of([(0.0, 10.0), (4.0, 8.0), (4.0, 6.0), (10.0, 11.0)].into_iter());
        assert_eq!((crowd.peak(), crowd.mean(0.0, 4.0), crowd.mean(4.0, 6.0), crowd.mean(0.0, 10.0)), (3, 1.0, 3.0, 1.6));
        assert_eq!((crowd.mean(10.0, 20.0), Crowd::of([].into_iter()).peak()), (0.1, 0));
    }

    #[test]
    fn what_waits_inside_an_engine_does_not_run() {
        let stay = |first| Stay { released: 0.0, first: Some(first), ended: first + 1.0, prompt: 1, output: 9 };
        let behind: Vec<Stay> = (1..=6).map(|first| stay(f64::from(first))).collect();
        assert_eq!(room(&behind, 4), (6, 1), "one at a time, whatever it is given");
        assert_eq!((room(&behind[..1], 8), room(&[], 0)), ((8, 8), (1, 1)));
    }

    #[test]
    fn more_requests_never_make_an_engine_faster() {
        let stream = |decoded, between| Stream { decoded, computed: 0.0, between, tokens: 1.0 };
        assert_eq!(line(&[stream(1.0, 2.0), stream(2.0, 1.0)], 0.0), (1.5, 0.0));
    }
}
