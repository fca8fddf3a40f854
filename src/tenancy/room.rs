//! How much of one owner - a key, a tenant, a model - may wait for a slot at once.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::Refused;
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
    /// Requests and bytes that are in it. Goes on over reloads, whatever becomes of the limits.
    held: Arc<Mutex<(u64, u64)>>,
}

/// A place in a room: given back on drop.
#[derive(Debug)]
pub struct Place {
    held: Arc<Mutex<(u64, u64)>>,
    bytes: u64,
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
    pub fn enter(&self, bytes: u64, before: bool) -> Result<Place, Refused> {
        let mut held = locked(&self.held);
        let full = |what| Err(Refused::Waiting { whose: self.whose, what });
        if !before {
            if let Some(most) = self.limits.requests.filter(|most| held.0 >= *most) {
                return full(Full::Requests(most));
            }
            if let Some(most) = self.limits.bytes.filter(|most| held.0 > 0 && held.1.saturating_add(bytes) > *most) {
                return full(Full::Bytes(most));
            }
        }
        *held = (held.0 + 1, held.1 + bytes);
        drop(held);
        Ok(Place { held: Arc::clone(&self.held), bytes })
    }

    /// Requests and bytes that are in it now.
    pub fn held(&self) -> (u64, u64) {
        *locked(&self.held)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut held = locked(&self.held);
        *held = (held.0 - 1, held.1 - self.bytes);
    }
}

/// Two numbers that are set together: whatever stopped a holder, they are sound.
fn locked(held: &Mutex<(u64, u64)>) -> MutexGuard<'_, (u64, u64)> {
    held.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    fn room(requests: Option<u64>, bytes: Option<u64>) -> Room {
        Room::new(Whose::Key, QueueLimits { requests, bytes }, None)
    }

    #[test]
    fn a_full_room_says_of_what_and_takes_nothing() {
        let room = room(Some(2), Some(100));
        let first = room.enter(60, false).unwrap();
        let refused = |what| Some(Refused::Waiting { whose: Whose::Key, what });
        assert_eq!(room.enter(41, false).err(), refused(Full::Bytes(100)));
        let second = room.enter(40, false).unwrap();
        assert_eq!(room.enter(0, false).err(), refused(Full::Requests(2)));
        assert_eq!(room.held(), (2, 100));
        let third = room.enter(500, true).unwrap();
        assert_eq!(room.held(), (3, 600), "what has waited before is let in, and counts");
        drop((first, second, third));
        assert_eq!(room.held(), (0, 0));
        assert!(room.enter(101, false).is_ok(), "alone, any body may wait");
    }

    #[test]
    fn a_reload_counts_on() {
        let before = room(None, None);
        let place = before.enter(10, false).unwrap();
        let after = Room::new(Whose::Key, QueueLimits { requests: Some(1), bytes: None }, Some(&before));
        assert!(after.enter(1, false).is_err());
        drop(place);
        assert_eq!(after.held(), (0, 0));
        assert!(after.enter(1, false).is_ok());
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
                            match room.enter(random >> 8 & 255, false) {
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
