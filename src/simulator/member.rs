//! One backend of a simulated fleet: an engine on a clock of its own, which can run slow or stand still.

use crate::engine::{self, Engine, Profile, Work};
use crate::scheduler::{BackendState, RequestId, Slots, Standing, Time, Weight};

use super::workload::Workload;

/// How a backend of the fleet is set up.
#[derive(Clone, Debug, PartialEq)]
pub struct Member {
    pub profile: Profile,
    /// How many times as fast as the profile says it is.
    pub speed: f64,
    /// How much the gateway lets it hold.
    pub slots: Slots,
    pub weight: Weight,
    /// Whether the gateway knows the size of its KV cache and its context length.
    pub known: bool,
}

/// What the gateway assumes of an engine that does not tell how many requests it runs at once, as vLLM does not.
pub const AUTO_SLOTS: Slots = Slots::Auto { initial: 8, max: 1024 };

impl Member {
    /// A backend as its profile says, whose window is found out.
    pub fn new(profile: Profile) -> Self {
        Member { profile, speed: 1.0, slots: AUTO_SLOTS, weight: Weight::ONE, known: true }
    }

    /// What the gateway knows of it in this standing.
    pub fn state(&self, standing: Standing) -> BackendState {
        let kv_tokens = u64::from(self.profile.kv_blocks) * u64::from(engine::BLOCK_TOKENS);
        BackendState {
            standing,
            slots: self.slots,
            weight: self.weight,
            kv_tokens: self.known.then_some(kv_tokens),
            context_tokens: self.known.then_some(self.profile.context()),
            prefix_cache: self.profile.prefix_cache || !self.known,
        }
    }
}

/// The engine's time against the simulation's.
#[derive(Clone, Copy, Debug)]
pub(super) struct Clock {
    since: Time,
    engine: Time,
    rate: f64,
}

impl Clock {
    pub fn new(now: Time, rate: f64) -> Self {
        Clock { since: now, engine: Time::ZERO, rate }
    }

    /// The engine's time now.
    pub fn engine(&self, now: Time) -> Time {
        let passed = now.since(self.since);
        self.engine.after(if self.rate == 1.0 { passed } else { passed.mul_f64(self.rate) })
    }

    /// When the engine's time will be `engine`; `None` while it stands still.
    pub fn global(&self, engine: Time) -> Option<Time> {
        let passed = engine.since(self.engine);
        match self.rate {
            1.0 => Some(self.since.after(passed)),
            rate if rate > 0.0 => Some(self.since.after(passed.div_f64(rate))),
            _ => None,
        }
    }

    /// Goes on at another rate.
    pub fn set_rate(&mut self, now: Time, rate: f64) {
        *self = Clock { since: now, engine: self.engine(now), rate };
    }
}

/// How many requests of this workload, in its own mix, a second of the whole fleet serves when all of it has always enough to do.
pub fn capacity(fleet: &[Member], workload: &Workload) -> f64 {
    fleet.iter().map(|member| alone(member, workload)).sum()
}

/// One engine that always has something to do: tokens computed until its queue is empty, over the time that took.
fn alone(member: &Member, workload: &Workload) -> f64 {
    let mut engine = Engine::new(member.profile);
    let (mut asked, mut taken) = (0_u64, 0_u64);
    for (id, job) in workload.jobs.iter().enumerate() {
        let work = Work { prompt_tokens: job.prompt, output_tokens: job.produces(), ..Work::default() };
        // What does not fit its context is no load either.
        if engine.submit(Time::ZERO, RequestId(id as u64), work).is_ok() {
            asked += u64::from(job.prompt) + u64::from(job.produces());
            taken += 1;
        }
    }
    let (mut now, mut events) = (Time::ZERO, Vec::new());
    while let Some(next) = engine.advance(now, &mut events) {
        events.clear();
        if engine.waiting() == 0 && now > Time::ZERO {
            break;
        }
        now = next;
    }
    let counters = engine.counters();
    let done = counters.prompt_tokens + counters.generation_tokens;
    let mean = asked as f64 / taken.max(1) as f64;
    if now == Time::ZERO || mean == 0.0 { 0.0 } else { done as f64 / mean / now.as_secs_f64() * member.speed }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::workload::Job;
    use super::*;
    use crate::engine::Timing;

    #[test]
    fn a_clock_can_run_slow_and_stand_still() {
        let seconds = |seconds: u64| Time::from_micros(seconds * 1_000_000);
        let mut clock = Clock::new(seconds(10), 1.0);
        assert_eq!((clock.engine(seconds(12)), clock.global(seconds(2))), (seconds(2), Some(seconds(12))));
        clock.set_rate(seconds(12), 0.5);
        assert_eq!((clock.engine(seconds(14)), clock.global(seconds(3))), (seconds(3), Some(seconds(14))));
        clock.set_rate(seconds(14), 0.0);
        assert_eq!((clock.engine(seconds(99)), clock.global(seconds(4))), (seconds(3), None));
        clock.set_rate(seconds(100), 2.0);
        assert_eq!(clock.global(seconds(5)), Some(seconds(101)));
    }

    #[test]
    fn capacity_is_what_slots_and_iterations_allow() {
        let timing = Timing { base: 10e-3, per_sequence: 0.0, per_prefill_token: 0.0, per_kv_token: 0.0 };
        let profile = Profile { timing, max_num_seqs: 4, ..Profile::large() };
        let workload = Workload { jobs: vec![Job::new(1, 100); 400], clients: None };
        // Four at a time, one second each; twice as fast the second one.
        let fleet = [Member::new(profile), Member { speed: 2.0, ..Member::new(profile) }];
        let measured = capacity(&fleet, &workload);
        assert!((measured / 12.0 - 1.0).abs() < 0.02, "{measured} requests a second");
        assert_eq!(capacity(&fleet, &Workload::default()), 0.0);
        assert_eq!(Clock::new(Time::ZERO, 1.0).global(Time::ZERO.after(Duration::ZERO)), Some(Time::ZERO));
    }
}
