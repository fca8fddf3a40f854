//! How often each address shows keys that nobody has.
//!
//! A fixed table of buckets, since whoever sends from many addresses must not make it grow: addresses that fall into the same bucket share what it allows. Only
//! refusals are counted here, so a full bucket never stands between a known key and its answer.

use std::hash::{BuildHasher, RandomState};
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::Instant;

/// Buckets. One takes eight bytes.
const BUCKETS: usize = 4096;
/// A minute in microseconds: what a bucket holds.
const MINUTE: u64 = 60_000_000;

/// The table. Each bucket is one number, as in the generic cell rate algorithm (ITU-T I.371, virtual scheduling): when everything that was taken is paid for,
/// in microseconds since `begun`.
pub(super) struct Strangers {
    /// Which addresses share a bucket differs from process to process.
    chance: RandomState,
    begun: Instant,
    buckets: Box<[AtomicU64]>,
}

impl Strangers {
    pub(super) fn new(now: Instant) -> Strangers {
        Strangers { chance: RandomState::new(), begun: now, buckets: (0..BUCKETS).map(|_| AtomicU64::new(0)).collect() }
    }

    /// Takes one refusal from what this address is allowed, `per_minute` of them a minute and as many at once.
    ///
    /// # Errors
    /// There is none left; how long until there is.
    pub(super) fn take(&self, from: IpAddr, per_minute: u32, now: Instant) -> Result<(), Duration> {
        let step = MINUTE / u64::from(per_minute.max(1));
        let now = u64::try_from(now.saturating_duration_since(self.begun).as_micros()).unwrap_or(u64::MAX / 2);
        let bucket = &self.buckets[self.chance.hash_one(sender(from)) as usize % BUCKETS];
        let next = |due: u64| Some(due.max(now) + step).filter(|next| *next <= now + MINUTE);
        // Relaxed is enough: nothing else is read by what this says.
        match bucket.try_update(Ordering::Relaxed, Ordering::Relaxed, next) {
            Ok(_) => Ok(()),
            Err(due) => Err(Duration::from_micros((due + step).saturating_sub(now + MINUTE))),
        }
    }
}

/// Who counts as one sender: an IPv4 address, or the /64 that one IPv6 subscriber has to choose addresses from (RFC 6177).
fn sender(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => IpAddr::V6((address.to_bits() >> 64 << 64).into()),
        address => address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from(address: &str) -> IpAddr {
        address.parse().unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn so_many_a_minute_and_no_more() {
        let start = Instant::now();
        let strangers = Strangers::new(start);
        let at = |seconds: f64| start + Duration::from_secs_f64(seconds);
        for _ in 0..6 {
            assert_eq!(strangers.take(from("10.0.0.1"), 6, start), Ok(()));
        }
        assert_eq!(strangers.take(from("10.0.0.1"), 6, start), Err(Duration::from_secs(10)));
        assert_eq!(strangers.take(from("::ffff:10.0.0.1"), 6, at(4.0)), Err(Duration::from_secs(6)), "the same address, written otherwise");
        // Whoever is refused is not refused for longer by asking.
        assert_eq!(strangers.take(from("10.0.0.1"), 6, at(10.0)), Ok(()));
        assert_eq!(strangers.take(from("10.0.0.1"), 6, at(10.0)), Err(Duration::from_secs(10)));
        assert_eq!((0..9).filter(|_| strangers.take(from("10.0.0.1"), 6, at(1000.0)).is_ok()).count(), 6, "a quiet hour saves up one minute");
    }

    #[tokio::test(start_paused = true)]
    async fn addresses_are_counted_apart_and_a_subscriber_once() {
        let now = Instant::now();
        let strangers = Strangers::new(now);
        // 4096 buckets and 64 addresses: that a tenth of them share one has a chance below one in a million.
        let apart = (0..64).filter(|n| strangers.take(from(&format!("10.0.0.{n}")), 1, now).is_ok()).count();
        assert!(apart > 57, "{apart}");
        let strangers = Strangers::new(now);
        assert_eq!(strangers.take(from("2001:db8:0:1::1"), 1, now), Ok(()));
        assert!(strangers.take(from("2001:db8:0:1:ffff::2"), 1, now).is_err());
        assert_eq!(sender("2001:db8:0:2::1".parse().unwrap()), "2001:db8:0:2::".parse::<IpAddr>().unwrap());
    }

    #[test]
    fn threads_never_take_more_than_there_is() {
        let now = Instant::now();
        let strangers = Strangers::new(now);
        let taken = |_| (0..1000).filter(|_| strangers.take(from("10.0.0.1"), 500, now).is_ok()).count();
        let all: usize = std::thread::scope(|scope| {
            (0..4).map(|n| scope.spawn(move || taken(n))).collect::<Vec<_>>().into_iter().map(|t| t.join().unwrap()).sum()
        });
        assert_eq!(all, 500);
    }
}
