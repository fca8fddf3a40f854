//! How much output sessions and agent programs have had lately: work that was attained, which the boost of their next requests takes into account.

use std::collections::BTreeMap;
use std::time::Duration;

use super::event::{TenantId, Tokens};
use super::time::Time;

/// Sessions remembered, at most; the half that nobody has heard of for longest goes at once.
const MOST: usize = 16_384;
/// After this long, what was attained counts half. A person who reads and thinks stays near the length of a few answers; a program that never pauses does not.
const HALF_LIFE: Duration = Duration::from_secs(300);

/// A session's name means nothing beside another tenant.
type Key = (Option<TenantId>, u64);

#[derive(Clone, Copy, Debug)]
struct Attained {
    tokens: f64,
    at: Time,
}

impl Attained {
    fn now(self, now: Time) -> f64 {
        self.tokens * (-now.since(self.at).as_secs_f64() / HALF_LIFE.as_secs_f64()).exp2()
    }
}

/// The sessions of one pool.
#[derive(Debug, Default)]
pub(super) struct Sessions {
    young: BTreeMap<Key, Attained>,
    old: BTreeMap<Key, Attained>,
}

impl Sessions {
    /// Output that a session has attained, as far as it still counts.
    pub fn attained(&self, now: Time, tenant: Option<TenantId>, session: u64) -> Tokens {
        let key = (tenant, session);
        // A float-to-integer cast saturates.
        self.young.get(&key).or_else(|| self.old.get(&key)).map_or(0, |attained| attained.now(now) as Tokens)
    }

    /// A session has had this much more.
    pub fn add(&mut self, now: Time, tenant: Option<TenantId>, session: u64, output: Tokens) {
        let key = (tenant, session);
        let before = self.young.get(&key).copied().or_else(|| self.old.remove(&key));
        let tokens = before.map_or(0.0, |attained| attained.now(now)) + f64::from(output);
        self.young.insert(key, Attained { tokens, at: now });
        if self.young.len() >= MOST / 2 {
            self.old = std::mem::take(&mut self.young);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Time {
        Time::from_micros(seconds * 1_000_000)
    }

    #[test]
    fn what_was_attained_adds_up_and_fades() {
        let mut sessions = Sessions::default();
        sessions.add(at(0), None, 1, 1000);
        sessions.add(at(300), None, 1, 500);
        assert_eq!(sessions.attained(at(300), None, 1), 1000);
        assert_eq!(sessions.attained(at(900), None, 1), 250);
        assert_eq!(sessions.attained(at(300), None, 2), 0);
    }

    #[test]
    fn a_session_is_one_tenants() {
        let mut sessions = Sessions::default();
        sessions.add(at(0), Some(TenantId(1)), 7, 1000);
        let attained = |tenant| sessions.attained(at(0), tenant, 7);
        assert_eq!((attained(Some(TenantId(1))), attained(Some(TenantId(2))), attained(None)), (1000, 0, 0));
    }

    #[test]
    fn remembers_the_recent_ones_in_bounded_memory() {
        let mut sessions = Sessions::default();
        for session in 0..10 * MOST as u64 {
            sessions.add(at(0), None, session, 100);
            sessions.add(at(0), None, 0, 1);
        }
        assert!(sessions.young.len() + sessions.old.len() <= MOST);
        assert_eq!(sessions.attained(at(0), None, 10 * MOST as u64 - 1), 100);
        assert_eq!(sessions.attained(at(0), None, 1), 0);
        assert_eq!(sessions.attained(at(0), None, 0), 100 + 10 * MOST as Tokens, "whoever goes on is not forgotten");
    }
}
