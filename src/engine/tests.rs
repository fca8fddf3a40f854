//! The model against its promises: single scenes by hand, and invariants over random histories.

use std::collections::BTreeMap;
use std::time::Duration;

use proptest::prelude::*;

use super::*;

/// 1 ms an iteration, nothing else costs: times can be counted in iterations.
const TICK: Timing = Timing { base: 1e-3, per_sequence: 0.0, per_prefill_token: 0.0, per_kv_token: 0.0 };

fn profile() -> Profile {
    Profile {
        timing: TICK,
        kv_blocks: 1_000,
        max_num_seqs: 4,
        max_batched_tokens: 100,
        max_model_len: 10_000,
        order: Order::Fcfs,
        prefix_cache: true,
        swap: None,
    }
}

fn ms(millis: u64) -> Time {
    Time::from_micros(millis * 1_000)
}

fn work(prompt_tokens: Tokens, output_tokens: Tokens) -> Work {
    Work { prompt_tokens, output_tokens, ..Work::default() }
}

/// Hashes for all full blocks of a prompt of one family: prompts of a family share their beginnings.
fn family(family: u64, prompt_tokens: Tokens) -> Vec<u64> {
    (0..u64::from(prompt_tokens / BLOCK_TOKENS)).map(|block| family * 1_000_000 + block).collect()
}

fn submit(engine: &mut Engine, at: Time, id: u64, work: Work) {
    engine.submit(at, RequestId(id), work).expect("it fits");
}

/// Runs until nothing is left to do; everything that happened, and every iteration.
fn run(engine: &mut Engine, from: Time) -> (Vec<Event>, Vec<Iteration>) {
    let (mut events, mut iterations, mut now) = (Vec::new(), Vec::new(), from);
    while let Some(next) = engine.advance(now, &mut events) {
        check(engine);
        iterations.push(*engine.iteration().expect("one is under way"));
        now = next;
    }
    (events, iterations)
}

fn admissions(events: &[Event]) -> Vec<u64> {
    events.iter().filter(|event| matches!(event.what, What::Admitted { .. })).map(|event| event.id.0).collect()
}

fn finished_at(events: &[Event], id: u64) -> Option<Time> {
    events.iter().find(|event| event.id.0 == id && event.what == What::Finished).map(|event| event.at)
}

/// What must hold between any two calls.
fn check(engine: &Engine) {
    let profile = engine.profile();
    let mut private = 0;
    let mut shared = Vec::new();
    for &place in &engine.running {
        let request = &engine.requests[place as usize];
        assert!(request.computed + request.taken <= request.room, "computes beyond its blocks: {request:?}");
        assert_eq!(request.room, (request.private + request.shared.len() as u32) * BLOCK_TOKENS, "room and blocks differ: {request:?}");
        assert!(request.computed < request.known && request.known <= request.target.max(request.prompt), "{request:?}");
        private += request.private;
        shared.extend(request.shared.iter().map(|block| format!("{block:?}")));
    }
    shared.sort();
    shared.dedup();
    assert_eq!(engine.kv_blocks_held(), private + shared.len() as u32, "blocks are lost or counted twice");
    assert!(engine.kv_blocks_held() <= profile.kv_blocks, "more blocks than there are");
    for &(_, _, place) in &engine.waiting {
        let request = &engine.requests[place as usize];
        assert_eq!((request.private, request.shared.len(), request.taken), (0, 0, 0), "holds something while it waits: {request:?}");
        assert!(request.computed == 0 || profile.swap.is_some() && request.preempted, "has something that is nowhere: {request:?}");
    }
    assert!(engine.running() <= profile.max_num_seqs as usize);
    assert_eq!(engine.running() + engine.waiting(), engine.places.len(), "a request is nowhere or twice");
    if let Some(iteration) = engine.iteration() {
        let alone = profile.order == Order::PrefillFirst && iteration.sequences == 1;
        assert!(alone || iteration.prefill_tokens + iteration.decode_tokens <= profile.max_batched_tokens, "over the token budget: {iteration:?}");
        assert!(iteration.sequences > 0 && iteration.ends > iteration.began);
    }
}

#[test]
fn a_request_prefills_then_decodes_one_token_an_iteration() {
    let mut engine = Engine::new(profile());
    submit(&mut engine, ms(5), 1, work(10, 3));
    let (events, iterations) = run(&mut engine, ms(5));
    let id = RequestId(1);
    assert_eq!(
        events,
        [
            Event { at: ms(5), id, what: What::Admitted { cached: 0 } },
            Event { at: ms(6), id, what: What::Token(1) },
            Event { at: ms(7), id, what: What::Token(2) },
            Event { at: ms(8), id, what: What::Token(3) },
            Event { at: ms(8), id, what: What::Finished },
        ]
    );
    let shape: Vec<_> = iterations.iter().map(|i| (i.prefill_tokens, i.decode_tokens, i.kv_tokens)).collect();
    assert_eq!(shape, [(10, 0, 10), (0, 1, 11), (0, 1, 12)]);
    let counters = Counters {
        prompt_tokens: 10,
        generation_tokens: 3,
        prefix_queries: 10,
        finished: 1,
        iterations: 3,
        busy: Duration::from_millis(3),
        ..Counters::default()
    };
    assert_eq!(*engine.counters(), counters);
    assert_eq!((engine.kv_blocks_held(), engine.iteration()), (0, None));
}

#[test]
fn an_iteration_takes_as_long_as_what_is_in_it() {
    let timing = Timing { base: 1e-3, per_sequence: 1e-4, per_prefill_token: 1e-5, per_kv_token: 1e-6 };
    let mut engine = Engine::new(Profile { timing, ..profile() });
    submit(&mut engine, Time::ZERO, 1, work(40, 2));
    submit(&mut engine, Time::ZERO, 2, work(20, 2));
    let mut events = Vec::new();
    assert_eq!(engine.advance(Time::ZERO, &mut events), Some(Time::from_micros(1_000 + 200 + 600 + 60)));
    assert_eq!(engine.advance(Time::from_micros(1_860), &mut events), Some(Time::from_micros(1_860 + 1_000 + 200 + 62)));
}

#[test]
fn a_long_prompt_goes_in_chunks_beside_those_that_decode() {
    let mut engine = Engine::new(profile());
    submit(&mut engine, Time::ZERO, 1, work(10, 8));
    let mut events = Vec::new();
    engine.advance(Time::ZERO, &mut events);
    submit(&mut engine, Time::ZERO, 2, work(250, 1));
    submit(&mut engine, Time::ZERO, 3, work(30, 1));
    let (events, iterations) = run(&mut engine, ms(1));
    let shape: Vec<_> = iterations.iter().map(|i| (i.prefill_tokens, i.decode_tokens)).collect();
    assert_eq!(shape, [(99, 1), (99, 1), (52 + 30, 1), (0, 1), (0, 1), (0, 1), (0, 1)]);
    assert_eq!((finished_at(&events, 2), finished_at(&events, 3)), (Some(ms(4)), Some(ms(4))));
}

#[test]
fn the_last_token_of_a_prompt_is_prefill_even_alone() {
    let mut engine = Engine::new(profile());
    submit(&mut engine, Time::ZERO, 1, work(101, 2));
    let shape: Vec<_> = run(&mut engine, Time::ZERO).1.iter().map(|i| (i.prefill_tokens, i.decode_tokens)).collect();
    assert_eq!(shape, [(100, 0), (1, 0), (0, 1)]);
}

#[test]
fn a_prompt_alone_ends_without_a_token() {
    let mut engine = Engine::new(profile());
    submit(&mut engine, Time::ZERO, 1, work(150, 0));
    let (events, iterations) = run(&mut engine, Time::ZERO);
    assert_eq!(iterations.len(), 2);
    assert_eq!(events.last().map(|event| event.what), Some(What::Finished));
    assert!(!events.iter().any(|event| matches!(event.what, What::Token(_))));
    assert_eq!((engine.counters().prompt_tokens, engine.counters().generation_tokens), (150, 0));
}

#[test]
fn fcfs_admits_by_arrival_and_ignores_priority() {
    let mut engine = Engine::new(Profile { max_num_seqs: 1, ..profile() });
    for (id, priority) in [(1, 5), (2, -3), (3, 0)] {
        submit(&mut engine, Time::ZERO, id, Work { priority, ..work(5, 2) });
    }
    assert_eq!(admissions(&run(&mut engine, Time::ZERO).0), [1, 2, 3]);
}

#[test]
fn priority_admits_the_lowest_number_first_and_equals_by_arrival() {
    let mut engine = Engine::new(Profile { max_num_seqs: 1, order: Order::Priority, ..profile() });
    for (id, priority) in [(1, 5), (2, -3), (3, 0), (4, -3), (5, 0)] {
        submit(&mut engine, Time::ZERO, id, Work { priority, ..work(5, 2) });
    }
    assert_eq!(admissions(&run(&mut engine, Time::ZERO).0), [2, 4, 3, 5, 1]);
}

#[test]
fn nobody_overtakes_a_request_that_waits_for_blocks() {
    let mut engine = Engine::new(Profile { kv_blocks: 5, ..profile() });
    submit(&mut engine, Time::ZERO, 1, work(40, 8));
    submit(&mut engine, Time::ZERO, 2, work(60, 1));
    submit(&mut engine, Time::ZERO, 3, work(5, 1));
    let (events, _) = run(&mut engine, Time::ZERO);
    assert_eq!(admissions(&events), [1, 2, 3]);
    assert!(events.iter().any(|event| event.id.0 == 2 && matches!(event.what, What::Admitted { .. }) && event.at == ms(8)));
}

#[test]
fn out_of_blocks_the_last_one_recomputes_prompt_and_answer_later() {
    // Each fits alone (3 blocks), both together do not.
    let mut engine = Engine::new(Profile { kv_blocks: 4, ..profile() });
    submit(&mut engine, Time::ZERO, 1, work(20, 20));
    submit(&mut engine, Time::ZERO, 2, work(20, 20));
    let (events, iterations) = run(&mut engine, Time::ZERO);
    let happened = |id: u64, what: What| events.iter().filter(|event| event.id.0 == id && event.what == what).count();
    assert_eq!((happened(1, What::Preempted), happened(2, What::Preempted)), (0, 1));
    // Preempted when the first needs a third block: after 13 tokens, having computed 20 + 12.
    let lost = events.iter().position(|event| event.what == What::Preempted).expect("preempted");
    assert!(events[..lost].iter().rev().any(|event| event.id.0 == 2 && event.what == What::Token(13)));
    let prefill: u32 = iterations.iter().map(|iteration| iteration.prefill_tokens).sum();
    let decode: u32 = iterations.iter().map(|iteration| iteration.decode_tokens).sum();
    assert_eq!(prefill, 20 + 20 + (20 + 13), "the second one's prompt and first 13 tokens are computed again");
    assert_eq!(decode, 19 + 12 + 6, "and that recomputation yields its 14th token");
    let tokens: Vec<Tokens> =
        events.iter().filter(|event| event.id.0 == 2).filter_map(|event| if let What::Token(n) = event.what { Some(n) } else { None }).collect();
    assert_eq!(tokens, (1..=20).collect::<Vec<_>>(), "no token is said twice");
    let counters = engine.counters();
    assert_eq!((counters.preemptions, counters.prompt_tokens, counters.generation_tokens), (1, 40, 40));
    assert_eq!(counters.prefix_queries, 40, "a readmission is no new query");
}

/// The same scene; a copied token costs 10 us.
#[test]
fn swapped_out_nothing_is_computed_again() {
    let mut engine = Engine::new(Profile { kv_blocks: 4, swap: Some(1e-5), ..profile() });
    submit(&mut engine, Time::ZERO, 1, work(20, 20));
    submit(&mut engine, Time::ZERO, 2, work(20, 20));
    let (events, iterations) = run(&mut engine, Time::ZERO);
    let computed = |count: fn(&Iteration) -> u32| iterations.iter().map(count).sum::<u32>();
    assert_eq!((computed(|i| i.prefill_tokens), computed(|i| i.decode_tokens)), (20 + 20, 19 + 19));
    // It had computed 20 + 12 tokens, which are copied out before the iteration that needs their room, and back in before its next one.
    let ends = [1, 2].map(|id| finished_at(&events, id).expect("it ends").as_micros());
    assert_eq!((engine.counters().preemptions, ends), (1, [20_000 + 320, 27_000 + 2 * 320]));
}

/// A swapped request is back beside those that decode; without a prompt to compute nobody waits for it.
#[test]
fn whole_prompts_first_is_about_prompts() {
    let mut engine = Engine::new(Profile { kv_blocks: 4, swap: Some(0.0), order: Order::PrefillFirst, ..profile() });
    submit(&mut engine, Time::ZERO, 1, work(20, 20));
    submit(&mut engine, Time::ZERO, 2, work(20, 12));
    submit(&mut engine, Time::ZERO, 3, work(20, 8));
    let (events, iterations) = run(&mut engine, Time::ZERO);
    assert!(iterations.iter().all(|iteration| iteration.prefill_tokens == 0 || iteration.decode_tokens == 0));
    let decode: u32 = iterations.iter().map(|iteration| iteration.decode_tokens).sum();
    assert_eq!((decode, events.iter().filter(|event| event.what == What::Finished).count()), (19 + 11 + 7, 3));
}

#[test]
fn out_of_blocks_the_least_important_gives_way_wherever_it_is() {
    let mut engine = Engine::new(Profile { kv_blocks: 4, order: Order::Priority, ..profile() });
    submit(&mut engine, Time::ZERO, 1, Work { priority: 9, ..work(20, 20) });
    let mut events = Vec::new();
    engine.advance(Time::ZERO, &mut events);
    submit(&mut engine, Time::ZERO, 2, Work { priority: 1, ..work(20, 20) });
    let (events, _) = run(&mut engine, ms(1));
    assert_eq!(events.iter().filter(|event| event.what == What::Preempted).map(|event| event.id.0).collect::<Vec<_>>(), [1]);
    assert!(finished_at(&events, 2) < finished_at(&events, 1));
}

#[test]
fn those_behind_one_that_gives_way_itself_go_on() {
    // The first one is the least important and the only one that needs a block; the second one still has room.
    let mut engine = Engine::new(Profile { kv_blocks: 3, order: Order::Priority, ..profile() });
    submit(&mut engine, Time::ZERO, 1, Work { priority: 9, ..work(31, 10) });
    submit(&mut engine, Time::ZERO, 2, Work { priority: 1, ..work(10, 5) });
    let (events, _) = run(&mut engine, Time::ZERO);
    assert!(events.contains(&Event { at: ms(2), id: RequestId(1), what: What::Preempted }));
    assert_eq!(finished_at(&events, 2), Some(ms(5)), "no iteration is lost");
}

#[test]
fn the_tokens_of_a_preempted_request_go_to_others_in_the_same_iteration() {
    let mut engine = Engine::new(Profile { kv_blocks: 7, max_batched_tokens: 48, order: Order::Priority, ..profile() });
    submit(&mut engine, Time::ZERO, 1, Work { priority: 9, ..work(48, 20) });
    let mut events = Vec::new();
    engine.advance(Time::ZERO, &mut events);
    submit(&mut engine, Time::ZERO, 2, Work { priority: 1, ..work(16, 20) });
    submit(&mut engine, Time::ZERO, 3, Work { priority: 2, ..work(110, 1) });
    // 1 decodes and holds 4 blocks, 2 has its prompt in 1, 3 the first 31 tokens in 2: none is left.
    engine.advance(ms(1), &mut events);
    // 2 needs a block for its next token, so 1 goes, and its share of the budget is 3's.
    engine.advance(ms(2), &mut events);
    check(&engine);
    assert!(events.contains(&Event { at: ms(2), id: RequestId(1), what: What::Preempted }));
    let iteration = engine.iteration().expect("one is under way");
    assert_eq!((iteration.sequences, iteration.prefill_tokens, iteration.decode_tokens, iteration.kv_tokens), (2, 47, 1, 78 + 17));
}

#[test]
fn a_known_prefix_is_not_computed_again() {
    let mut engine = Engine::new(profile());
    let prompt = |tokens| Work { prefix_hashes: family(7, tokens), ..work(tokens, 1) };
    submit(&mut engine, Time::ZERO, 1, prompt(70));
    run(&mut engine, Time::ZERO);
    submit(&mut engine, ms(10), 2, prompt(70));
    let (events, iterations) = run(&mut engine, ms(10));
    assert_eq!(events[0].what, What::Admitted { cached: 64 });
    assert_eq!((iterations.len(), iterations[0].prefill_tokens, iterations[0].kv_tokens), (1, 6, 70));
    submit(&mut engine, ms(20), 3, prompt(64));
    let (events, _) = run(&mut engine, ms(20));
    assert_eq!(events[0].what, What::Admitted { cached: 48 }, "one token has to be computed, so the last block is");
    assert_eq!((engine.counters().prefix_queries, engine.counters().prefix_hits), (70 + 70 + 64, 64 + 48));

    let mut without = Engine::new(Profile { prefix_cache: false, ..profile() });
    for id in [1, 2] {
        submit(&mut without, Time::ZERO, id, prompt(70));
    }
    run(&mut without, Time::ZERO);
    assert_eq!(without.counters().prefix_hits, 0);
}

#[test]
fn a_block_is_findable_even_if_its_prompt_ends_with_it() {
    let mut engine = Engine::new(Profile { max_batched_tokens: 20, ..profile() });
    submit(&mut engine, Time::ZERO, 1, Work { prefix_hashes: family(7, 32), ..work(32, 1) });
    run(&mut engine, Time::ZERO);
    submit(&mut engine, ms(10), 2, Work { prefix_hashes: family(7, 40), ..work(40, 1) });
    assert_eq!(run(&mut engine, ms(10)).0[0].what, What::Admitted { cached: 32 });
}

#[test]
fn hashes_beyond_the_prompt_are_ignored() {
    let mut engine = Engine::new(profile());
    submit(&mut engine, Time::ZERO, 1, Work { prefix_hashes: family(7, 64), ..work(20, 50) });
    run(&mut engine, Time::ZERO);
    submit(&mut engine, ms(100), 2, Work { prefix_hashes: family(7, 64), ..work(64, 1) });
    assert_eq!(run(&mut engine, ms(100)).0[0].what, What::Admitted { cached: 16 }, "what was produced is in no hash");
}

#[test]
fn requests_at_once_share_the_blocks_of_their_prefix() {
    let mut engine = Engine::new(profile());
    for id in [1, 2] {
        submit(&mut engine, Time::ZERO, id, Work { prefix_hashes: family(7, 40), ..work(40, 5) });
    }
    let mut events = Vec::new();
    engine.advance(Time::ZERO, &mut events);
    check(&engine);
    assert_eq!(engine.kv_blocks_held(), 2 + 1 + 1, "two blocks of prefix, a last block each");
    engine.cancel(RequestId(1));
    check(&engine);
    assert_eq!(engine.kv_blocks_held(), 3);
}

#[test]
fn cancelling_frees_slot_and_blocks_at_once() {
    let mut engine = Engine::new(Profile { max_num_seqs: 1, ..profile() });
    submit(&mut engine, Time::ZERO, 1, work(40, 50));
    submit(&mut engine, Time::ZERO, 2, work(40, 1));
    submit(&mut engine, Time::ZERO, 3, work(40, 1));
    let mut events = Vec::new();
    assert_eq!(engine.advance(Time::ZERO, &mut events), Some(ms(1)));
    assert!(engine.cancel(RequestId(2)), "a waiting one");
    assert!(engine.cancel(RequestId(1)), "a running one, in the middle of its iteration");
    assert_eq!((engine.running(), engine.waiting(), engine.kv_blocks_held()), (0, 1, 0));
    assert!(!engine.cancel(RequestId(1)) && !engine.cancel(RequestId(99)), "unknown ones");
    assert_eq!(engine.advance(Time::from_micros(500), &mut events), Some(ms(1)), "the iteration takes as long as it would have");
    let (events, _) = run(&mut engine, ms(1));
    assert_eq!(events.iter().map(|event| event.id.0).collect::<Vec<_>>(), [3, 3, 3]);
    assert_eq!((engine.counters().cancelled, engine.counters().finished), (2, 1));
}

#[test]
fn what_can_never_run_is_refused() {
    let mut engine = Engine::new(Profile { kv_blocks: 10, ..profile() });
    assert_eq!(engine.submit(Time::ZERO, RequestId(1), work(100, 61)), Err(Refused::TooLong { asked: 161, context: 160 }));
    assert_eq!(engine.submit(Time::ZERO, RequestId(1), work(u32::MAX, u32::MAX)).map_err(|error| error.to_string().len() > 10), Err(true));
    assert_eq!(engine.submit(Time::ZERO, RequestId(1), work(0, 5)), Err(Refused::Empty));
    assert_eq!(engine.submit(Time::ZERO, RequestId(1), work(100, 60)), Ok(()));
    assert_eq!(engine.submit(Time::ZERO, RequestId(1), work(1, 1)), Err(Refused::Duplicate));
    assert_eq!(engine.waiting(), 1);
}

#[test]
fn a_request_is_not_admitted_before_it_arrives() {
    let mut engine = Engine::new(profile());
    submit(&mut engine, Time::ZERO, 1, work(5, 10));
    let mut events = Vec::new();
    engine.advance(Time::ZERO, &mut events);
    // Whoever drives the engine wakes at 3.5 ms; iterations that began at 1, 2 and 3 ms are told only now.
    let late = Time::from_micros(3_500);
    submit(&mut engine, late, 2, work(5, 1));
    events.clear();
    engine.advance(ms(20), &mut events);
    let admitted = events.iter().find(|event| event.id.0 == 2).expect("admitted");
    assert_eq!((admitted.what, admitted.at), (What::Admitted { cached: 0 }, ms(4)));
}

#[test]
fn whole_prompts_first_while_nobody_decodes() {
    let mut engine = Engine::new(Profile { order: Order::PrefillFirst, ..profile() });
    submit(&mut engine, Time::ZERO, 1, work(10, 3));
    let mut events = Vec::new();
    engine.advance(Time::ZERO, &mut events);
    for (id, prompt) in [(2, 60), (3, 50), (4, 250)] {
        submit(&mut engine, Time::ZERO, id, work(prompt, 1));
    }
    let shape: Vec<_> = run(&mut engine, ms(1)).1.iter().map(|i| (i.sequences, i.prefill_tokens, i.decode_tokens)).collect();
    // 60 and 50 do not fit an iteration together, and the long one goes alone.
    assert_eq!(shape, [(1, 60, 0), (1, 50, 0), (1, 250, 0), (1, 0, 1), (1, 0, 1)]);
}

/// One slot, and three requests that come one after the other: when each is done, and how often one gave way.
fn done(order: Order, requests: [(u64, Tokens); 3]) -> ([u64; 3], u64) {
    let mut engine = Engine::new(Profile { max_num_seqs: 1, max_batched_tokens: 1_000, order, ..profile() });
    let mut events = Vec::new();
    for (id, (at, output)) in requests.into_iter().enumerate() {
        engine.advance(ms(at), &mut events);
        submit(&mut engine, ms(at), id as u64, work(10, output));
        engine.advance(ms(at), &mut events);
    }
    events.extend(run(&mut engine, ms(requests[2].0)).0);
    let ended = [0, 1, 2].map(|id| finished_at(&events, id).map_or(0, |at| at.as_micros() / 1000));
    (ended, engine.counters().preemptions)
}

#[test]
fn the_shortest_goes_first_and_whoever_runs_stays() {
    assert_eq!(done(Order::Shortest, [(0, 100), (1, 50), (2, 20)]), ([100, 170, 120], 0));
}

#[test]
fn the_least_remaining_takes_the_place_of_one_that_is_not_far_yet() {
    let order = |until| Order::Remaining { noise: 0.0, until };
    // A request that comes at 10 ms is considered at 11; what gave way is computed again in the iteration that makes its next token.
    assert_eq!(done(order(1.0), [(0, 100), (10, 50), (20, 10)]), ([160, 71, 31], 2));
    assert_eq!(done(order(0.05), [(0, 100), (10, 50), (20, 10)]), ([100, 160, 110], 0));
}

#[test]
fn the_least_attained_goes_first_by_levels() {
    // The first has a level when the second comes, the second none yet when the third does.
    assert_eq!(done(Order::Attained, [(0, 100), (80, 30), (90, 30)]), ([160, 111, 141], 1));
}

#[test]
fn boosts_preempt_step_by_step() {
    let order = |step| Order::Boost(Boosting { step, gamma: Some(0.1) });
    let scene = [(0, 1200), (600, 10), (615, 10)];
    assert_eq!(done(order(Step::Queues), scene), ([1200, 1210, 1220], 0), "nobody gives way");
    assert_eq!(done(order(Step::Unified), scene), ([1220, 611, 626], 2));
    assert_eq!(done(order(Step::Guarded), scene), ([1220, 611, 685], 2), "64 tokens after it went on");
    // Neither is as far ahead as 1/gamma.
    assert_eq!(done(order(Step::Unified), [(0, 130), (100, 10), (105, 10)]), ([130, 140, 150], 0));
}

#[derive(Clone, Debug)]
enum Act {
    Submit { prompt: Tokens, output: Tokens, priority: i64, family: u64 },
    Cancel(usize),
    Wait(u64),
}

fn step() -> impl Strategy<Value = Act> {
    prop_oneof![
        4 => (1..200u32, 0..60u32, -2..3i64, 0..4u64)
            .prop_map(|(prompt, output, priority, family)| Act::Submit { prompt, output, priority, family }),
        1 => (0..100usize).prop_map(Act::Cancel),
        4 => (0..20_000u64).prop_map(Act::Wait),
    ]
}

fn any_profile() -> impl Strategy<Value = Profile> {
    let boost = |step, gamma| Order::Boost(Boosting { step, gamma });
    let orders = vec![
        Order::Fcfs,
        Order::Priority,
        Order::PrefillFirst,
        Order::Shortest,
        Order::Remaining { noise: 0.0, until: 1.0 },
        Order::Remaining { noise: 0.8, until: 0.5 },
        Order::Attained,
        boost(Step::Queues, Some(1.0)),
        boost(Step::Unified, Some(1.0)),
        boost(Step::Guarded, None),
    ];
    let swap = prop::option::of(Just(1e-5));
    let profile = (17..60u32, 1..8u32, 1..150u32, prop::sample::select(orders), any::<bool>(), swap);
    profile.prop_map(|(kv_blocks, max_num_seqs, max_batched_tokens, order, prefix_cache, swap)| {
        let timing = Timing { base: 1e-3, per_sequence: 1e-4, per_prefill_token: 1e-5, per_kv_token: 1e-6 };
        Profile { timing, kv_blocks, max_num_seqs, max_batched_tokens, max_model_len: 10_000, order, prefix_cache, swap }
    })
}

/// Plays a history to its end, checking the invariants after every call. What happened, and what each accepted request asked for.
fn play(profile: Profile, steps: &[Act]) -> (Engine, Vec<Event>, BTreeMap<u64, Tokens>, u64) {
    let mut engine = Engine::new(profile);
    let (mut events, mut now, mut accepted, mut cancelled) = (Vec::new(), Time::ZERO, BTreeMap::new(), 0);
    for (id, step) in steps.iter().enumerate() {
        match *step {
            Act::Submit { prompt, output, priority, family: kin } => {
                let work = Work { prompt_tokens: prompt, prefix_hashes: family(kin, prompt), output_tokens: output, priority };
                if engine.submit(now, RequestId(id as u64), work).is_ok() {
                    accepted.insert(id as u64, output);
                }
            }
            Act::Cancel(of) => cancelled += u64::from(engine.cancel(RequestId(of as u64))),
            Act::Wait(micros) => now = now.after(Duration::from_micros(micros)),
        }
        check(&engine);
        engine.advance(now, &mut events);
        check(&engine);
        assert!(engine.iteration().is_some() || engine.running() + engine.waiting() == 0, "idle beside work");
    }
    let mut left = 200_000;
    while let Some(next) = engine.advance(now, &mut events) {
        check(&engine);
        now = next;
        left -= 1;
        assert!(left > 0, "it never ends");
    }
    (engine, events, accepted, cancelled)
}

proptest! {
    #[test]
    fn every_request_ends_once_with_all_its_tokens_in_order(profile in any_profile(), steps in prop::collection::vec(step(), 1..60)) {
        let (engine, events, accepted, cancelled) = play(profile, &steps);
        let mut produced: BTreeMap<u64, Tokens> = BTreeMap::new();
        let mut finished: BTreeMap<u64, u32> = BTreeMap::new();
        let (mut last, mut preempted_at) = (Time::ZERO, None);
        for Event { at, id, what } in &events {
            prop_assert!(*at >= last, "events go back in time");
            last = *at;
            prop_assert!(!finished.contains_key(&id.0), "something happens after the end");
            preempted_at = if *what == What::Preempted { Some(*at) } else { preempted_at };
            let admitted = matches!(what, What::Admitted { .. });
            let plain = matches!(profile.order, Order::Fcfs | Order::Priority);
            prop_assert!(!(plain && admitted && preempted_at == Some(*at)), "admitted in an iteration that had to preempt");
            match what {
                What::Token(n) => {
                    let so_far = produced.entry(id.0).or_default();
                    *so_far += 1;
                    prop_assert_eq!(*so_far, *n);
                }
                What::Finished => {
                    prop_assert_eq!(produced.get(&id.0).copied().unwrap_or(0), accepted[&id.0]);
                    *finished.entry(id.0).or_default() += 1;
                }
                What::Admitted { .. } | What::Preempted => {}
            }
        }
        let counters = engine.counters();
        prop_assert_eq!(counters.finished, finished.len() as u64);
        prop_assert_eq!(counters.cancelled, cancelled);
        prop_assert_eq!(accepted.len() as u64, counters.finished + counters.cancelled);
        prop_assert_eq!(counters.generation_tokens, produced.values().map(|&n| u64::from(n)).sum::<u64>());
        prop_assert_eq!((engine.running(), engine.waiting(), engine.kv_blocks_held()), (0, 0, 0));
        prop_assert_eq!(engine.vacant.len(), engine.requests.len());
    }

    #[test]
    fn the_same_history_gives_the_same_events(profile in any_profile(), steps in prop::collection::vec(step(), 1..60)) {
        let (first, events, ..) = play(profile, &steps);
        let (second, again, ..) = play(profile, &steps);
        prop_assert_eq!(events, again);
        prop_assert_eq!(first.counters(), second.counters());
    }

    #[test]
    fn requests_of_one_importance_are_first_admitted_in_order_of_arrival(profile in any_profile(), steps in prop::collection::vec(step(), 1..60)) {
        prop_assume!(matches!(profile.order, Order::Fcfs | Order::Priority | Order::PrefillFirst));
        let (_, events, ..) = play(profile, &steps);
        let mut newest: BTreeMap<i64, u64> = BTreeMap::new();
        let mut seen = std::collections::BTreeSet::new();
        for id in admissions(&events).into_iter().filter(|&id| seen.insert(id)) {
            let Act::Submit { priority, .. } = steps[id as usize] else { unreachable!("only these have ids") };
            let class = if profile.order == Order::Priority { priority } else { 0 };
            prop_assert!(newest.insert(class, id).is_none_or(|before| before < id), "{} overtook", id);
        }
    }

    #[test]
    fn calling_late_changes_nothing(
        profile in any_profile(),
        works in prop::collection::vec((1..200u32, 0..60u32, -2..3i64, 0..4u64), 1..20),
        delays in prop::collection::vec(0..30_000u64, 1..10),
    ) {
        let history = |delays: &[u64]| {
            let mut engine = Engine::new(profile);
            for (id, &(prompt_tokens, output_tokens, priority, kin)) in works.iter().enumerate() {
                let work = Work { prompt_tokens, prefix_hashes: family(kin, prompt_tokens), output_tokens, priority };
                submit(&mut engine, Time::ZERO, id as u64, work);
            }
            let (mut events, mut now) = (Vec::new(), Time::ZERO);
            for delay in delays.iter().cycle() {
                let Some(next) = engine.advance(now, &mut events) else { break };
                now = next.after(Duration::from_micros(*delay));
            }
            (events, *engine.counters())
        };
        prop_assert_eq!(history(&delays), history(&[0]));
    }
}
