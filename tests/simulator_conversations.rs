//! Conversations on several backends with prefix caches: a turn goes where the turns before it are cached, unless the wait there costs more than it saves.

mod common;

use std::time::Duration;

use common::gateway;
use headway::engine::Profile;
use headway::scheduler::{Gamma, Order, Target};
use headway::simulator::{Arrivals, Conversations, Dispatch, Figures, Length, Member, Part, Setup, Workload, capacity, run};

fn lengths(median: f64, sigma: f64, longest: u32) -> Length {
    Length::LogNormal { parts: vec![Part { share: 1.0, median, sigma }], longest }
}

/// At this share of what the fleet could do if it computed every prompt in full.
fn workload(fleet: &[Member], load: f64) -> Workload {
    let like = Conversations { turns: lengths(5.0, 0.7, 30), think: Duration::from_secs(20), system: 1200, systems: 12, longest: 14_000 };
    let mut workload = Workload::converse(1500, &like, Arrivals::Poisson, &lengths(120.0, 1.2, 4000), &lengths(220.0, 0.9, 2000), 1);
    workload.pace(load * capacity(fleet, &workload));
    workload
}

fn figures(fleet: &[Member], workload: &Workload, dispatch: Dispatch, affinity: bool) -> Figures {
    let setup = Setup { affinity, ..Setup::new(fleet.to_vec(), dispatch) };
    run(&setup, workload, 1).unwrap_or_else(|broken| panic!("{broken}")).figures(0.2)
}

fn engine(profile: Profile, sequences: u32) -> Member {
    Member::new(Profile { max_num_seqs: sequences, ..profile })
}

#[test]
fn a_turn_finds_what_was_said_before_and_starts_sooner() {
    let fleet = vec![engine(Profile::medium(), 16); 4];
    for load in [0.5, 1.4] {
        let workload = workload(&fleet, load);
        let ours = figures(&fleet, &workload, gateway(Order::Headway, Gamma::Target(Target::Mean)), true);
        for (dispatch, affinity) in
            [(Dispatch::RoundRobin, true), (Dispatch::LeastLoaded, true), (gateway(Order::Headway, Gamma::Target(Target::Mean)), false)]
        {
            let other = figures(&fleet, &workload, dispatch.clone(), affinity);
            let found = (ours.cached, other.cached, ours.ttft.mean, other.ttft.mean, ours.ttlt.mean, other.ttlt.mean);
            println!("load {load}: {found:.3?} {dispatch:?}");
            assert!(ours.cached > other.cached + 0.1, "{found:?}");
            assert!(ours.ttft.mean < 0.75 * other.ttft.mean && ours.ttft.p99 < 0.85 * other.ttft.p99, "{found:?}");
            assert!(ours.ttlt.mean < other.ttlt.mean, "{found:?}");
        }
    }
}

/// Whoever stays with its backend whatever waits there gets the better cache and the worse answer.
#[test]
fn a_slow_backend_is_left_whatever_it_has() {
    let fleet = [engine(Profile::large(), 64), engine(Profile::medium(), 32), engine(Profile::small(), 16), engine(Profile::small(), 16)];
    let workload = workload(&fleet, 0.7);
    let ours = figures(&fleet, &workload, gateway(Order::Headway, Gamma::Target(Target::Mean)), true);
    let sticky = figures(&fleet, &workload, Dispatch::Sticky, true);
    let blind = figures(&fleet, &workload, gateway(Order::Headway, Gamma::Target(Target::Mean)), false);
    println!("{:.3?}", [(ours.cached, ours.ttft.mean), (sticky.cached, sticky.ttft.mean), (blind.cached, blind.ttft.mean)]);
    assert!(ours.ttft.mean < 0.2 * sticky.ttft.mean && ours.ttft.mean < blind.ttft.mean && ours.cached > blind.cached);
}
