//! How much of one owner - a key, a tenant, a model - may wait for a slot at once.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::time::Instant;

use super::Refused;
use super::pace::Pace;
use crate::config::QueueLimits;

/// Whose requests wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whose {
    Key,
    Tenant,
    Model,
}

impl std::fmt::Display for Whose {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Whose::Key => "this API key",
            Whose::Tenant => "this API key's tenant",
            Whose::Model => "this model",
        })
    }
}

/// What of the waiting there is too much of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Full {
    Requests(u64),
    Bytes(u64),
}

/// Where the requests of one owner wait. A clone is the same room.
#[derive(Clone, Debug)]
pub struct Room {
    whose: Whose,
    limits: QueueLimits,
    /// What is in it. Goes on over reloads, whatever becomes of the limits.
    held: Arc<Mutex<Held>>,
}

/// What is in a room, and how fast it goes out.
#[derive(Debug, Default)]
struct Held {
    requests: u64,
    bytes: u64,
    pace: Pace,
}

/// A place in a room: given back on drop.
#[derive(Debug)]
pub struct Place {
    held: Arc<Mutex<Held>>,
    bytes: u64,
    since: Instant,
}

impl Room {
    /// The room of an owner that had `before`, if it was there.
    pub fn new(whose: Whose, limits: QueueLimits, before: Option<&Room>) -> Room {
        Room { whose, limits, held: before.map(|before| Arc::clone(&before.held)).unwrap_or_default() }
    }

    /// Goes in with a body of so many bytes, to wait. One that has waited `before`, and comes back because its backend failed, is let in also where it is full.
    /// A body that is larger than all that may wait is let in where nothing else waits: refused, it could never be served.
    ///
    /// # Errors
    /// It is full. Nothing is taken then.
    pub fn enter(&self, bytes: u64, before: bool, now: Instant) -> Result<Place, Refused> {
        let mut held = locked(&self.held);
        if !before {
            let full = |what, places| Err(Refused::Waiting { whose: self.whose, what, wait: held.pace.until(places, now) });
            if let Some(most) = self.limits.requests.filter(|most| held.requests >= *most) {
                return full(Full::Requests(most), held.requests - most + 1);
            }
            if let Some(most) = self.limits.bytes.filter(|most| held.requests > 0 && held.bytes.saturating_add(bytes) > *most) {
                return full(Full::Bytes(most), held.places_of(held.bytes.saturating_add(bytes) - most));
            }
        }
        if held.requests == 0 {
            held.pace.begins(now);
        }
        held.requests += 1;
        held.bytes += bytes;
        drop(held);
        Ok(Place { held: Arc::clone(&self.held), bytes, since: now })
    }

    /// Requests and bytes that are in it now.
    pub fn held(&self) -> (u64, u64) {
        let held = locked(&self.held);
        (held.requests, held.bytes)
    }
}

impl Held {
    /// How many of those that are here have to go until so many bytes have gone, if each has as many as the mean.
    fn places_of(&self, bytes: u64) -> u64 {
        let mean = self.bytes as f64 / self.requests as f64;
        ((bytes as f64 / mean).ceil() as u64).min(self.requests)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let now = Instant::now();
        let mut held = locked(&self.held);
        held.requests -= 1;
        held.bytes -= self.bytes;
        held.pace.left(now.saturating_duration_since(self.since), now);
    }
}

/// Numbers that are set together: whatever stopped a holder, they are sound.
fn locked(held: &Mutex<Held>) -> MutexGuard<'_, Held> {
    held.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::Duration;

    use super::*;

    fn room(requests: Option<u64>, bytes: Option<u64>) -> Room {
        Room::new(Whose::Key, QueueLimits { requests, bytes }, None)
    }

    /// Goes in now.
    fn enter(room: &Room, bytes: u64, before: bool) -> Result<Place, Refused> {
        room.enter(bytes, before, Instant::now())
    }

    #[tokio::test(start_paused = true)]
    async fn a_full_room_says_of_what_and_takes_nothing() {
        let room = room(Some(2), Some(100));
        let first = enter(&room, 60, false).unwrap();
        let refused = |what| Some(Refused::Waiting { whose: Whose::Key, what, wait: Duration::ZERO });
        assert_eq!(enter(&room, 41, false).err(), refused(Full::Bytes(100)));
        let second = enter(&room, 40, false).unwrap();
        assert_eq!(enter(&room, 0, false).err(), refused(Full::Requests(2)));
        assert_eq!(room.held(), (2, 100));
        let third = enter(&room, 500, true).unwrap();
        assert_eq!(room.held(), (3, 600), "what has waited before is let in, and counts");
        drop((first, second, third));
        assert_eq!(room.held(), (0, 0));
        assert!(enter(&room, 101, false).is_ok(), "alone, any body may wait");
    }

    #[tokio::test(start_paused = true)]
    async fn a_reload_counts_on() {
        let before = room(None, None);
        let places = [10, 10].map(|bytes| enter(&before, bytes, false).unwrap());
        let after = Room::new(Whose::Key, QueueLimits { requests: Some(1), bytes: None }, Some(&before));
        for place in places {
            tokio::time::advance(Duration::from_secs(7)).await;
            assert!(enter(&after, 1, false).is_err());
            drop(place);
        }
        assert_eq!(after.held(), (0, 0));
        let _place = enter(&after, 1, false).unwrap();
        assert_eq!(enter(&after, 1, false).err().and_then(|refused| refused.retry_after()), Some(7), "what is known of its pace goes on");
    }

    #[tokio::test(start_paused = true)]
    async fn who_is_refused_is_told_when_enough_will_have_gone() {
        let told = |room: &Room, bytes| enter(room, bytes, false).err().and_then(|refused| refused.retry_after());
        for (requests, bytes) in [(Some(3), None), (None, Some(1000))] {
            let room = room(requests, bytes);
            let mut places: std::collections::VecDeque<Place> = (0..3).map(|_| enter(&room, 200, false).unwrap()).collect();
            for _ in 0..20 {
                tokio::time::advance(Duration::from_secs(3)).await;
                places.pop_front();
                places.push_back(enter(&room, 200, false).unwrap());
            }
            if requests.is_some() {
                assert_eq!(told(&room, 1), Some(3));
                let _again = enter(&room, 0, true).unwrap();
                assert_eq!(told(&room, 1), Some(6), "one more is here than may be");
                tokio::time::advance(Duration::from_millis(1500)).await;
                assert_eq!(told(&room, 1), Some(5), "half of the next one's time has passed: 4.5 s");
            } else {
                assert_eq!(told(&room, 401), Some(3), "one has to go for this body");
                assert_eq!(told(&room, 601), Some(6), "and two for this one");
                assert_eq!(told(&room, 5000), Some(9), "and all of them for one that is larger than all that may wait");
            }
        }
    }

    #[test]
    fn no_place_leaks_and_no_limit_is_passed_whatever_happens_at_once() {
        const MOST: u64 = 7;
        let (room, inside, refused) = (room(Some(MOST), Some(1000)), AtomicU64::new(0), AtomicU64::new(0));
        std::thread::scope(|scope| {
            for seed in 1..=4_u64 {
                let (room, inside, refused) = (&room, &inside, &refused);
                scope.spawn(move || {
                    let (mut random, mut places) = (seed.wrapping_mul(0x9e37_79b9_7f4a_7c15), Vec::new());
                    for _ in 0..50_000 {
                        random ^= random << 13;
                        random ^= random >> 7;
                        random ^= random << 17;
                        if random.is_multiple_of(2) && places.len() < 4 {
                            match enter(room, random >> 8 & 255, false) {
                                Ok(place) => {
                                    // Counted after it went in and before it goes out: never more than are inside.
                                    let now = inside.fetch_add(1, Ordering::SeqCst) + 1;
                                    assert!(now <= MOST, "{now}");
                                    places.push(place);
                                }
                                Err(_) => _ = refused.fetch_add(1, Ordering::Relaxed),
                            }
                        } else if let Some(place) = places.pop() {
                            inside.fetch_sub(1, Ordering::SeqCst);
                            drop(place);
                        }
                    }
                    inside.fetch_sub(places.len() as u64, Ordering::SeqCst);
                });
            }
        });
        assert_eq!((room.held(), inside.into_inner()), ((0, 0), 0));
        assert!(refused.into_inner() > 100, "the limits were met");
    }
}
