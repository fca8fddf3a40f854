//! How much simulated work one core does: request-iterations, that is one token's worth of one request, per second.

use std::hint::black_box;

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use headway::engine::{Engine, Order, Profile, Work};
use headway::scheduler::{RequestId, Time};

/// A stream of numbers that look random.
struct Chance(u64);

impl Chance {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }
}

/// Runs an engine dry; how many request-iterations that took.
fn run(engine: &mut Engine) -> u64 {
    let (mut events, mut now, mut done) = (Vec::with_capacity(1_024), Time::ZERO, 0);
    while let Some(next) = engine.advance(now, &mut events) {
        done += u64::from(engine.iteration().map_or(0, |iteration| iteration.sequences));
        now = next;
        black_box(&events);
        events.clear();
    }
    done
}

/// 256 requests that only decode.
fn decoding() -> Engine {
    let mut engine = Engine::new(Profile::large());
    for id in 0..256 {
        let work = Work { prompt_tokens: 16, output_tokens: 400, ..Work::default() };
        engine.submit(Time::ZERO, RequestId(id), work).expect("it fits");
    }
    engine
}

/// 2,000 requests with prompts of four families in too little memory: chunks, cache hits, evictions and preemptions.
fn crowded(order: Order) -> Engine {
    let mut engine = Engine::new(Profile { kv_blocks: 2_000, max_num_seqs: 64, order, ..Profile::medium() });
    let mut chance = Chance(7);
    for id in 0..2_000 {
        let prompt_tokens = 100 + chance.below(1_500) as u32;
        let family = chance.below(4);
        let shared = 40;
        let prefix_hashes =
            (0..u64::from(prompt_tokens / 16)).map(|block| if block < shared { family << 32 | block } else { id << 40 | block }).collect();
        let work = Work { prompt_tokens, prefix_hashes, output_tokens: 20 + chance.below(400) as u32, priority: chance.below(5) as i64 };
        engine.submit(Time::ZERO, RequestId(id), work).expect("it fits");
    }
    engine
}

fn bench(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("engine");
    group.sample_size(10);
    for (name, engine) in [("decoding", decoding()), ("crowded_fcfs", crowded(Order::Fcfs)), ("crowded_priority", crowded(Order::Priority))] {
        let mut probe = engine.clone();
        group.throughput(Throughput::Elements(run(&mut probe)));
        println!(
            "{name}: {} preemptions, {} of {} prefix tokens cached",
            probe.counters().preemptions,
            probe.counters().prefix_hits,
            probe.counters().prefix_queries
        );
        group.bench_function(name, |bencher| bencher.iter_batched(|| engine.clone(), |mut engine| run(&mut engine), BatchSize::LargeInput));
    }
    group.finish();
}

criterion_group!(benches, bench);
criterion_main!(benches);
