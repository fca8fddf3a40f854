//! Promises of the dispatcher, under paused time: whatever is dropped or lost at whatever moment, every request ends once and every slot comes back.

use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use super::*;
use crate::scheduler::{Ending, Gamma, Lead, MaxOvertake, Order, PolicyParts, Slots, Standing};

fn settings() -> Settings {
    let policy = Policy::new(PolicyParts {
        order: Order::Fcfs,
        gamma: Gamma::Adaptive,
        max_overtake: MaxOvertake::Auto,
        aging_threshold: Duration::from_secs(120),
        aging_share: 0.25,
        lead: Lead::Auto,
        overload: false,
    })
    .unwrap();
    Settings { policy, limits: Limits { queue_requests: 100, queue_bytes: 1 << 20, max_output: 4096 }, seed: 1 }
}

fn backend(slots: u32, standing: Standing) -> BackendState {
    BackendState { standing, slots: Slots::Fixed(slots), weight: Weight::ONE, kv_tokens: None, context_tokens: None, prefix_cache: true }
}

fn arrival(pool: &Dispatcher) -> Arrival {
    Arrival {
        arrived: pool.now(),
        model: ModelId(0),
        score: None,
        history: None,
        prompt_tokens: 10,
        max_output: Some(100),
        attained: 0,
        tenant: None,
        weight: Weight::ONE,
        share: Weight::ONE,
        expires: pool.now().after(Duration::from_secs(60)),
        bytes: 1000,
        unscored: false,
        excluded: Vec::new(),
        label: "mine".into(),
    }
}

const A: BackendId = BackendId(0);
const B: BackendId = BackendId(1);

fn pool(slots: u32) -> Dispatcher {
    let pool = Dispatcher::spawn(settings());
    pool.backend_changed(A, backend(slots, Standing::Healthy));
    pool
}

/// (waiting, bytes waiting, in flight over all backends)
async fn load(pool: &Dispatcher) -> (usize, u64, u32) {
    let view = pool.view().await.unwrap();
    (view.waiting, view.waiting_bytes, view.in_flight)
}

#[tokio::test(start_paused = true)]
async fn a_free_slot_is_granted_and_comes_back() {
    let pool = pool(1);
    let permit = pool.enqueue(arrival(&pool)).granted().await.unwrap();
    assert_eq!(permit.backend(), A);
    assert_eq!(load(&pool).await, (0, 0, 1));
    permit.finish(Ending::Completed { output: 5, prompt: None });
    assert_eq!(load(&pool).await, (0, 0, 0));
}

#[tokio::test(start_paused = true)]
async fn a_dropped_permit_gives_its_slot_to_the_next() {
    let pool = pool(1);
    let first = pool.enqueue(arrival(&pool)).granted().await.unwrap();
    let mut second = pool.enqueue(arrival(&pool));
    assert_eq!(load(&pool).await, (1, 1000, 1));
    drop(first);
    assert!(second.granted().await.is_ok());
}

/// Polls `future` `polls` times, with everything else running in between, then drops it.
async fn poll_then_drop<F: Future>(future: F, polls: usize) {
    let mut future = pin!(future);
    for _ in 0..polls {
        let poll = future.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        if let Poll::Ready(result) = poll {
            drop(result);
            return;
        }
        tokio::task::yield_now().await;
    }
}

#[tokio::test(start_paused = true)]
async fn cancelling_at_every_await_point_frees_everything() {
    // With a free slot and with a full backend, dropped after 0, 1, 2 ... polls: before the owner hears of it, while it waits, with the grant under way, granted.
    for full in [false, true] {
        for polls in 0..6 {
            let pool = pool(1);
            let holder = if full { Some(pool.enqueue(arrival(&pool)).granted().await.unwrap()) } else { None };
            let request = async {
                let mut ticket = pool.enqueue(arrival(&pool));
                let mut permit = ticket.granted().await?;
                permit.progress(70);
                tokio::task::yield_now().await;
                permit.finish(Ending::Completed { output: 80, prompt: None });
                Ok::<(), Rejection>(())
            };
            poll_then_drop(request, polls).await;
            drop(holder);
            assert_eq!(load(&pool).await, (0, 0, 0), "full: {full}, dropped after {polls} polls");
            assert!(pool.enqueue(arrival(&pool)).granted().await.is_ok(), "the slot is usable again");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_release_that_crosses_a_cancel_gives_the_slot_back_once() {
    let pool = pool(1);
    let holder = pool.enqueue(arrival(&pool)).granted().await.unwrap();
    let crossing = pool.enqueue(arrival(&pool));
    let mut patient = pool.enqueue(arrival(&pool));
    assert_eq!(load(&pool).await, (2, 2000, 1));
    // The owner releases `crossing` when it hears of the free slot; the cancel is sent before it has run.
    drop(holder);
    drop(crossing);
    let permit = patient.granted().await.unwrap();
    assert_eq!(load(&pool).await, (0, 0, 1));
    // The other way round: the grant already lies in the ticket when that is dropped.
    let mut last = pool.enqueue(arrival(&pool));
    let granted = pool.enqueue(arrival(&pool));
    let order = load(&pool).await;
    assert_eq!(order, (2, 2000, 1));
    drop(permit);
    let permit = last.granted().await.unwrap();
    drop(permit);
    assert_eq!(load(&pool).await, (0, 0, 1), "the grant waits in the ticket that nobody has asked yet");
    drop(granted);
    assert_eq!(load(&pool).await, (0, 0, 0));
}

#[tokio::test(start_paused = true)]
async fn losing_the_last_backend_answers_everyone_who_waits() {
    let pool = pool(1);
    let running = pool.enqueue(arrival(&pool)).granted().await.unwrap();
    let mut waiting = pool.enqueue(arrival(&pool));
    pool.backend_changed(A, backend(1, Standing::Ejected));
    assert_eq!(waiting.granted().await.unwrap_err().reason, Reason::NoHealthyBackend);
    assert_eq!(load(&pool).await, (0, 0, 1), "what runs there may still finish");
    drop(running);
    assert_eq!(load(&pool).await, (0, 0, 0));
}

#[tokio::test(start_paused = true)]
async fn a_lost_backend_with_a_living_sibling_loses_no_request() {
    let pool = pool(1);
    pool.backend_changed(B, backend(1, Standing::Healthy));
    let mut running = Vec::new();
    for _ in 0..2 {
        running.push(pool.enqueue(arrival(&pool)).granted().await.unwrap());
    }
    let mut waiting: Vec<_> = (0..10).map(|_| pool.enqueue(arrival(&pool))).collect();
    assert_eq!(load(&pool).await, (10, 10_000, 2));
    pool.backend_changed(A, backend(1, Standing::Ejected));
    running.retain(|permit| permit.backend() == B);
    for ticket in &mut waiting {
        running.clear();
        let permit = ticket.granted().await.unwrap();
        assert_eq!(permit.backend(), B);
        running.push(permit);
    }
    running.clear();
    assert_eq!(load(&pool).await, (0, 0, 0));
}

#[tokio::test(start_paused = true)]
async fn waiting_too_long_expires_at_the_deadline() {
    let pool = pool(1);
    let _holder = pool.enqueue(arrival(&pool)).granted().await.unwrap();
    let start = Instant::now();
    let rejection = pool.enqueue(arrival(&pool)).granted().await.unwrap_err();
    assert_eq!(rejection.reason, Reason::Expired);
    assert!(rejection.retry_after >= 1);
    let waited = start.elapsed();
    assert!(waited >= Duration::from_secs(60) && waited < Duration::from_secs(61), "{waited:?}");
}

#[tokio::test(start_paused = true)]
async fn a_drain_lets_work_finish_and_refuses_new_work() {
    let pool = pool(1);
    let running = pool.enqueue(arrival(&pool)).granted().await.unwrap();
    let mut waiting = pool.enqueue(arrival(&pool));
    let drain = tokio::spawn({
        let pool = pool.clone();
        async move { pool.drain(Duration::from_secs(30)).await }
    });
    tokio::task::yield_now().await;
    assert_eq!(pool.enqueue(arrival(&pool)).granted().await.unwrap_err().reason, Reason::Draining);
    running.finish(Ending::Completed { output: 1, prompt: None });
    waiting.granted().await.unwrap().finish(Ending::Completed { output: 1, prompt: None });
    assert_eq!(drain.await.unwrap(), Drained { turned_away: 0, running: 0 });
}

#[tokio::test(start_paused = true)]
async fn a_drain_deadline_turns_away_what_still_waits() {
    let pool = pool(1);
    let running = pool.enqueue(arrival(&pool)).granted().await.unwrap();
    let mut waiting = pool.enqueue(arrival(&pool));
    let drained = pool.drain(Duration::from_secs(5)).await;
    assert_eq!(drained, Drained { turned_away: 1, running: 1 });
    assert_eq!(waiting.granted().await.unwrap_err().reason, Reason::Draining);
    drop(running);
    assert_eq!(load(&pool).await, (0, 0, 0));
}

#[tokio::test(start_paused = true)]
async fn the_owner_ends_with_its_last_handle() {
    let pool = pool(1);
    let permit = pool.enqueue(arrival(&pool)).granted().await.unwrap();
    let messages = pool.messages.downgrade();
    drop(pool);
    assert!(messages.upgrade().is_some(), "a permit keeps the owner alive, to be settled");
    drop(permit);
    tokio::task::yield_now().await;
    assert!(messages.upgrade().is_none());
}

#[tokio::test(start_paused = true)]
async fn progress_is_told_at_geometric_levels() {
    let pool = pool(1);
    let mut permit = pool.enqueue(arrival(&pool)).granted().await.unwrap();
    let mut told = Vec::new();
    for output in 1..=1000 {
        let before = permit.next_level();
        permit.progress(output);
        if permit.next_level() != before {
            told.push(output);
        }
    }
    assert_eq!(told, [1, 64, 128, 256, 512]);
}

#[test]
fn the_owner_goes_on_in_another_runtime_with_all_it_had() {
    let runtime = || tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_time().build().unwrap();
    let (first, second) = (runtime(), runtime());
    let (pool, waits) = first.block_on(async {
        let pool = pool(1);
        let holder = pool.enqueue(arrival(&pool)).granted().await.unwrap();
        let waits = pool.enqueue(arrival(&pool));
        pool.move_to(second.handle().clone());
        assert_eq!(load(&pool).await, (1, 1000, 1));
        drop(holder);
        (pool, waits)
    });
    drop(first);
    second.block_on(async {
        let mut waits = waits;
        assert!(waits.granted().await.is_ok());
        assert_eq!(load(&pool).await, (0, 0, 0));
    });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn thousands_are_ordered_anew_and_nobody_is_lost() {
    let pool = Dispatcher::spawn(Settings { limits: Limits { queue_requests: 10_000, queue_bytes: 1 << 30, max_output: 4096 }, ..settings() });
    pool.backend_changed(A, backend(0, Standing::Healthy));
    let tickets: Vec<Ticket> = (0..2 * MANY).map(|_| pool.enqueue(arrival(&pool))).collect();
    pool.policy_changed(settings().policy);
    assert_eq!(load(&pool).await.0, 2 * MANY);
    drop(tickets);
    assert_eq!(load(&pool).await, (0, 0, 0));
}

#[tokio::test(start_paused = true)]
async fn a_closeup_names_those_that_run_and_those_that_wait() {
    let pool = pool(1);
    let named = |label: &str| Arrival { label: label.into(), ..arrival(&pool) };
    let first = pool.enqueue(named("first")).granted().await.unwrap();
    let waiting = [pool.enqueue(named("second")), pool.enqueue(named("third"))];
    let labels = |closeup: &Closeup, of: fn(&QueueView) -> &Vec<crate::scheduler::RequestView>| {
        of(&closeup.queues[0]).iter().map(|request| closeup.labels[&request.id].to_string()).collect::<Vec<_>>()
    };
    let seen = pool.closeup(2).await.unwrap();
    assert_eq!(
        (labels(&seen, |queue| &queue.running), labels(&seen, |queue| &queue.waiting)),
        (vec!["first".into()], vec!["second".into(), "third".into()])
    );
    assert_eq!((pool.closeup(1).await.unwrap().labels.len(), seen.pool.waiting), (2, 2));
    drop(waiting);
    drop(first);
    let seen = pool.closeup(2).await.unwrap();
    assert!(seen.labels.is_empty() && seen.pool.in_flight == 0);
}

#[tokio::test(start_paused = true)]
async fn a_request_is_found_by_its_label() {
    let pool = pool(1);
    let named = |label: &str| Arrival { label: label.into(), ..arrival(&pool) };
    let first = pool.enqueue(named("first")).granted().await.unwrap();
    let second = pool.enqueue(named("second"));
    let third = pool.enqueue(named("third"));
    let found = pool.find("third", 5).await.unwrap();
    assert_eq!(found.standpoint.position.map(|position| (position.ahead, position.overtaken_by)), Some((1, 0)));
    assert_eq!(found.calibrated, None, "it has no score");
    assert_eq!(pool.find("first", 5).await.unwrap().standpoint.position, None);
    assert!(pool.find("fourth", 5).await.is_none());
    drop((third, second, first));
    assert!(pool.find("third", 5).await.is_none());
}
