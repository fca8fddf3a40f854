//! What one event costs the scheduling core with 10 to a million requests waiting, what one request costs it with 4 to 200 backends, what rebuilding all keys costs,
//! and how much memory a waiting request takes.
//!
//! `cargo bench --no-default-features --bench scheduler`

use std::alloc::{GlobalAlloc, Layout, System};
use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, criterion_group};
use headway::scheduler::*;

/// The system's allocator, counting what is allocated.
struct Counting;

static ALLOCATED: AtomicUsize = AtomicUsize::new(0);

// SAFETY: everything is passed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATED.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        ALLOCATED.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `dealloc`.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const CROWDS: [usize; 4] = [10, 10_000, 100_000, 1_000_000];
/// Backends, and the slots of each: as many together, whatever their number.
const POOLS: [(u32, u32); 3] = [(4, 200), (50, 16), (200, 4)];

fn policy(gamma: Gamma) -> Policy {
    let parts = PolicyParts {
        order: Order::Headway,
        gamma,
        max_overtake: MaxOvertake::Auto,
        aging_threshold: Duration::from_secs(120),
        aging_share: 0.25,
        lead: Lead::Auto,
        overload: false,
    };
    Policy::new(parts).expect("the parts are consistent")
}

/// One of ten thousand conversations under one of ten system prompts, at any of its turns.
fn history(random: u64) -> Arc<History> {
    let (conversation, turn) = (random >> 20 & 0x3fff, random >> 40 & 7);
    let prefix = |number: u64, tokens| Prefix { hash: number.wrapping_mul(0x9e37_79b9_7f4a_7c15), tokens };
    let system = prefix(conversation % 10 + 1, 200);
    let turns = (turn..turn + 4).map(|turn| prefix(conversation << 8 | turn | 1 << 40, 400 + 100 * turn as u32));
    Arc::new(History::new([system].into_iter().chain(turns), None))
}

/// A pool and requests of all lengths.
struct Pool {
    scheduler: Scheduler,
    /// Whether requests are turns of conversations.
    histories: bool,
    now: u64,
    next: u64,
    random: u64,
    running: Vec<RequestId>,
    actions: Vec<Action>,
}

impl Pool {
    /// Four backends with 64 slots each, all taken, and so many that wait.
    fn with_waiting(waiting: usize) -> Self {
        Pool::of((4, 64), 256 + waiting, true)
    }

    fn of((backends, slots): (u32, u32), requests: usize, histories: bool) -> Self {
        let limits = Limits { queue_requests: 2_000_000, queue_bytes: u64::MAX, max_output: 4096 };
        let mut pool = Pool {
            scheduler: Scheduler::new(policy(Gamma::Adaptive), limits, 1),
            histories,
            now: 0,
            next: 0,
            random: 1,
            running: Vec::new(),
            actions: Vec::new(),
        };
        for id in 0..backends {
            let slots = Slots::Fixed(slots);
            let state = BackendState {
                standing: Standing::Healthy,
                slots,
                weight: Weight::ONE,
                kv_tokens: Some(1 << 40),
                context_tokens: Some(1 << 20),
                prefix_cache: true,
            };
            pool.handle(Event::BackendChanged(BackendId(id), state));
        }
        for _ in 0..requests {
            pool.arrive();
        }
        pool
    }

    fn random(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random
    }

    fn handle(&mut self, event: Event) {
        self.scheduler.handle(Time::from_micros(self.now), event, &mut self.actions);
        for action in self.actions.drain(..) {
            if let Action::Release { request, .. } = action {
                self.running.push(request);
            }
        }
    }

    fn request(&mut self) -> Request {
        let random = self.random();
        self.next += 1;
        Request {
            id: RequestId(self.next),
            arrived: Time::from_micros(self.now),
            model: ModelId(0),
            score: Score::new((random % 1000) as f32).map(|score| Scored { score, version: RankerVersion(1) }),
            prompt_tokens: (random >> 10) as u32 % 4000,
            max_output: None,
            attained: 0,
            weight: Weight::ONE,
            share: Weight::ONE,
            expires: Time::from_micros(self.now + 1_000_000_000_000),
            bytes: 1000,
            unscored: false,
            excluded: Vec::new(),
            tenant: None,
            history: self.histories.then(|| history(random)),
            oracle_output: None,
        }
    }

    fn arrive(&mut self) {
        self.now += 100;
        let request = self.request();
        self.handle(Event::Arrived(request));
    }

    /// A running request ends, and the next one is released.
    fn finish(&mut self) {
        self.now += 100;
        let pick = self.random() as usize % self.running.len();
        let output = self.random() as u32 % 500;
        let id = self.running.swap_remove(pick);
        self.handle(Event::Finished(id, Ending::Completed { output, prompt: None }));
    }

    /// A running request tells how far it is.
    fn progress(&mut self) {
        self.now += 100;
        let pick = self.random() as usize % self.running.len();
        let output = self.random() as u32 % 500;
        self.handle(Event::Progress(self.running[pick], output));
    }
}

/// The time of every single event, of which the quantiles are printed: a mean would hide what one event costs behind what is done every few seconds.
fn quantiles() {
    println!("one event, ns (of 100,000 each, mixed)            arrive          finish+release        progress");
    for waiting in CROWDS {
        let mut pool = Pool::with_waiting(waiting);
        let mut times: [Vec<u64>; 3] = std::array::from_fn(|_| Vec::with_capacity(100_000));
        for _ in 0..100_000 {
            for (times, event) in times.iter_mut().zip([Pool::arrive, Pool::finish, Pool::progress]) {
                let start = Instant::now();
                event(&mut pool);
                times.push(start.elapsed().as_nanos() as u64);
            }
        }
        print!("  {waiting:>9} waiting, p50 / p99 / max:");
        for times in &mut times {
            times.sort_unstable();
            print!("  {:>6} / {:>6} / {:>9}", times[50_000], times[99_000], times[99_999]);
        }
        println!();
    }
}

fn memory() {
    println!("memory per waiting request, bytes");
    // One above a power of two is where a table that doubles is emptiest.
    for waiting in [10_000, 65_537, 98_305, 100_000, 196_609, 786_433, 1_000_000] {
        let empty = Pool::with_waiting(0);
        let before = ALLOCATED.load(Ordering::Relaxed);
        let pool = Pool::with_waiting(waiting);
        let bytes = ALLOCATED.load(Ordering::Relaxed) - before;
        println!("  {waiting:>9} waiting: {:.0}", bytes as f64 / waiting as f64);
        black_box((empty, pool));
    }
}

fn events(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("an arrival and a release");
    group.sample_size(20);
    for waiting in CROWDS {
        let mut pool = Pool::with_waiting(waiting);
        group.bench_function(BenchmarkId::from_parameter(waiting), |bencher| {
            bencher.iter(|| {
                pool.arrive();
                pool.finish();
            });
        });
    }
    group.finish();
}

/// What a request costs from its arrival to its end, by how many backends there are.
fn backends(criterion: &mut Criterion) {
    let slots: usize = 800;
    for (name, requests, histories) in
        [("nothing waits", slots / 4, false), ("nothing waits, conversations", slots / 4, true), ("10,000 wait", slots + 10_000, false)]
    {
        let mut group = criterion.benchmark_group(format!("one request by backends, {name}"));
        group.sample_size(20);
        for shape in POOLS {
            let mut pool = Pool::of(shape, requests, histories);
            group.bench_function(BenchmarkId::from_parameter(shape.0), |bencher| {
                bencher.iter(|| {
                    pool.arrive();
                    pool.progress();
                    pool.finish();
                });
            });
        }
        group.finish();
    }
}

fn rebuilds(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("rebuild of all keys");
    group.sample_size(10);
    for waiting in &CROWDS[1..] {
        let mut pool = Pool::with_waiting(*waiting);
        let mut gammas = [0.5, 0.05].into_iter().cycle();
        group.bench_function(BenchmarkId::from_parameter(waiting), |bencher| {
            bencher.iter_custom(|times| {
                (0..times)
                    .map(|_| {
                        let policy = policy(Gamma::Fixed(gammas.next().expect("a cycle has no end")));
                        let start = Instant::now();
                        pool.handle(Event::PolicyChanged(policy));
                        start.elapsed()
                    })
                    .sum()
            });
        });
    }
    group.finish();
}

criterion_group!(benches, events, backends, rebuilds);

fn main() {
    // Without `--bench` this is a test that the benchmarks run at all; with a name it is about the benchmarks of that name.
    if std::env::args().skip(1).all(|argument| argument == "--bench") && std::env::args().len() > 1 {
        memory();
        quantiles();
    }
    benches();
    Criterion::default().configure_from_args().final_summary();
}
