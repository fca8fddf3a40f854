//! Who asks, what he may ask for, and how much of it.
//!
//! A request shows a key, whose SHA-256 names its tenant. What it takes from its tenant's limits it holds as an [`Admission`]: dropped with the request, that
//! gives back what was not used, whatever became of it.
//!
//! `allowance` so much a minute · `key` making keys · `pace` how fast places come free · `priority` how urgent · `room` how much of an owner may wait · `strangers` who shows keys that nobody has.

mod allowance;
mod key;
mod pace;
mod priority;
mod room;
mod strangers;

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use http::HeaderMap;
use http::header::{AUTHORIZATION, HeaderName, HeaderValue};
use tokio::time::Instant;

pub use allowance::{Allowance, Standing};
pub use key::{KeyHash, NewKey, NoChance, NotAHash};
pub use priority::Priority;
pub use room::{Full, Place, Room, Whose};

use pace::Pace;
use strangers::Strangers;

use crate::config::{KeySettings, TenantLimits, TenantSettings};
use crate::scheduler::{TenantId, Tokens};

/// Anthropic's and Azure's headers for a key; OpenAI's is `authorization: Bearer`.
pub const API_KEYS: [HeaderName; 2] = [HeaderName::from_static("x-api-key"), HeaderName::from_static("api-key")];
/// Output tokens that a tenant's first requests reserve.
const ASSUMED_OUTPUT: f64 = 256.0;
/// Share of a new answer in a tenant's mean output.
const NEWEST: f64 = 0.05;

/// All tenants of one snapshot.
pub struct Tenancy {
    by_key: HashMap<KeyHash, Known>,
    tenants: BTreeMap<String, Arc<Tenant>>,
    /// How often each address has shown keys that are nobody's. Goes on over reloads.
    strangers: Arc<Strangers>,
    /// How often it may, per minute.
    unknown_per_minute: u32,
    next_id: u32,
}

/// What is known of a key.
pub struct Known {
    pub tenant: Arc<Tenant>,
    /// Where what shows this key waits, if that has limits.
    pub room: Option<Room>,
}

/// One tenant.
pub struct Tenant {
    settings: Arc<TenantSettings>,
    id: TenantId,
    meters: Arc<Meters>,
    /// Requests here, waiting or running. Goes on over reloads, whatever becomes of the limits.
    held: Arc<Here>,
    room: Room,
}

/// A tenant's requests that are here.
#[derive(Default)]
struct Here {
    requests: AtomicU64,
    /// How fast they end. Nobody looks at it where as many may be here as will.
    pace: Mutex<Pace>,
}

/// What is counted against a tenant's limits.
struct Meters {
    limits: TenantLimits,
    requests: Option<Allowance>,
    input: Option<Allowance>,
    output: Option<Allowance>,
    /// The mean output of recent answers.
    typical: Mutex<f64>,
}

/// Why a tenant's request is not taken. Its text is for the client.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    #[error("an API key is required: send it as `authorization: Bearer KEY`, `x-api-key: KEY` or `api-key: KEY`")]
    NoKey,
    #[error("the API key is not known here")]
    UnknownKey,
    #[error("more than {limit} requests a minute from this address show API keys that are not known here; try again in {} s", seconds(*.wait))]
    UnknownKeys { limit: u32, wait: Duration },
    #[error("this API key may not use the model `{0}`")]
    Model(String),
    #[error("the limit of {limit} {what} a minute is reached; try again in {} s", seconds(*.wait))]
    Rate { what: What, limit: u64, wait: Duration },
    #[error("{limit} requests of this API key's tenant are here already, which is as many as it may have at once; try again in {} s", seconds(*.wait))]
    Concurrent { limit: u64, wait: Duration },
    #[error("{}; try again in {} s", full(*.whose, *.what), seconds(*.wait))]
    Waiting { whose: Whose, what: Full, wait: Duration },
}

/// What there is a limit of, per minute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    Requests,
    InputTokens,
    OutputTokens,
}

impl What {
    /// As the configuration calls it, less the minute.
    pub fn as_str(self) -> &'static str {
        match self {
            What::Requests => "requests",
            What::InputTokens => "input_tokens",
            What::OutputTokens => "output_tokens",
        }
    }
}

impl std::fmt::Display for What {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.as_str().replace('_', " "))
    }
}

fn full(whose: Whose, what: Full) -> String {
    match what {
        Full::Requests(most) => format!("{most} requests of {whose} wait for a backend already, which is as many as may"),
        Full::Bytes(most) => format!("the bodies of the requests of {whose} that wait for a backend would exceed {most} bytes with this one"),
    }
}

/// Whole seconds after which it is worth trying again.
fn seconds(wait: Duration) -> u64 {
    (wait.as_secs_f64().ceil() as u64).max(1)
}

impl Refused {
    /// Seconds after which it is worth trying again, where that can be said.
    pub fn retry_after(&self) -> Option<u32> {
        match self {
            Refused::Rate { wait, .. } | Refused::UnknownKeys { wait, .. } | Refused::Concurrent { wait, .. } | Refused::Waiting { wait, .. } => {
                Some(u32::try_from(seconds(*wait)).unwrap_or(u32::MAX))
            }
            Refused::NoKey | Refused::UnknownKey | Refused::Model(_) => None,
        }
    }
}

impl Tenancy {
    /// The tenants of a configuration. One that was there `before` keeps its id and what is counted against it; other limits are counted anew.
    pub fn new(settings: &KeySettings, before: Option<&Tenancy>, now: Instant) -> Tenancy {
        let mut next_id = before.map_or(0, |before| before.next_id);
        let mut by_key = HashMap::new();
        let mut tenants = BTreeMap::new();
        for settings in &settings.tenants {
            let known = before.and_then(|before| before.tenants.get(&settings.name));
            let id = known.map_or_else(
                || {
                    next_id += 1;
                    TenantId(next_id)
                },
                |known| known.id,
            );
            let meters = match known {
                Some(known) if known.meters.limits == settings.limits => Arc::clone(&known.meters),
                _ => Arc::new(Meters::new(settings.limits, now)),
            };
            let held = known.map(|known| Arc::clone(&known.held)).unwrap_or_default();
            let room = Room::new(Whose::Tenant, settings.queue, known.map(|known| &known.room));
            let tenant = Arc::new(Tenant { settings: Arc::clone(settings), id, meters, held, room });
            by_key.extend(settings.keys.iter().map(|key| {
                let room_before = before.and_then(|before| before.by_key.get(&key.hash)?.room.as_ref());
                let room = key.queue.is_limited().then(|| Room::new(Whose::Key, key.queue, room_before));
                (key.hash, Known { tenant: Arc::clone(&tenant), room })
            }));
            tenants.insert(settings.name.clone(), tenant);
        }
        let strangers = before.map_or_else(|| Arc::new(Strangers::new(now)), |before| Arc::clone(&before.strangers));
        Tenancy { by_key, tenants, strangers, unknown_per_minute: settings.unknown_per_minute, next_id }
    }

    /// Whose request this is, by the key in its head; `from` is where the connection comes from. Costs one hash: the key itself is nowhere to be compared with.
    ///
    /// # Errors
    /// There is no key, or nobody's, or that too often from the same address. What comes with a known key is never held against its address, nor the reverse.
    pub fn who(&self, headers: &HeaderMap, from: IpAddr) -> Result<&Known, Refused> {
        let key = shown(headers).ok_or(Refused::NoKey)?;
        self.by_key.get(&KeyHash::of(key)).ok_or_else(|| match self.strangers.take(from, self.unknown_per_minute, Instant::now()) {
            Ok(()) => Refused::UnknownKey,
            Err(wait) => Refused::UnknownKeys { limit: self.unknown_per_minute, wait },
        })
    }

    /// All tenants, by name.
    pub fn tenants(&self) -> impl Iterator<Item = &Arc<Tenant>> {
        self.tenants.values()
    }
}

/// The key that a client shows.
fn shown(headers: &HeaderMap) -> Option<&[u8]> {
    let bearer = |value: &HeaderValue| -> Option<usize> {
        let scheme = value.as_bytes().get(..7)?;
        scheme.eq_ignore_ascii_case(b"bearer ").then_some(7)
    };
    if let Some(value) = headers.get(AUTHORIZATION)
        && let Some(at) = bearer(value)
    {
        return Some(value.as_bytes()[at..].trim_ascii());
    }
    API_KEYS.iter().find_map(|name| headers.get(name)).map(|value| value.as_bytes().trim_ascii())
}

impl Tenant {
    /// Its name, for logs and metrics.
    pub fn name(&self) -> &str {
        &self.settings.name
    }

    /// As configured.
    pub fn settings(&self) -> &TenantSettings {
        &self.settings
    }

    /// What the scheduler knows it by.
    pub fn id(&self) -> TenantId {
        self.id
    }

    /// Whether it may ask for this model, as clients call it.
    pub fn may_use(&self, model: &str) -> bool {
        self.settings.models.as_ref().is_none_or(|models| models.contains(model))
    }

    /// Where its requests wait, if that has limits.
    pub fn room(&self) -> Option<&Room> {
        Some(&self.room).filter(|_| self.settings.queue.is_limited())
    }

    /// Requests of it that are here now.
    pub fn held(&self) -> u64 {
        self.held.requests.load(Ordering::Relaxed)
    }

    /// Takes a request of `input` prompt tokens, by estimate, that may produce at most `most` output tokens. Of these it reserves what is likely: the tenant's
    /// usual output, if that is less. What produces none is not held up by a limit on output.
    ///
    /// # Errors
    /// A limit is reached. Nothing is taken then, of any limit.
    pub fn admit(self: &Arc<Self>, input: Tokens, most: Tokens, now: Instant) -> Result<Admission, Refused> {
        let (meters, limits) = (&self.meters, &self.settings.limits);
        let typical = *meters.typical.lock().unwrap_or_else(PoisonError::into_inner);
        let output = u64::from(most).min((typical.round() as u64).max(1));
        let held = self.held.requests.fetch_add(1, Ordering::Relaxed);
        // From here on, a drop gives back what was taken so far.
        let mut admission = Admission { tenant: Arc::clone(self), meters: Arc::clone(meters), input: 0, output: 0, since: now };
        if let Some(limit) = limits.concurrent_requests {
            if held >= limit {
                return Err(Refused::Concurrent { limit, wait: self.pace().until(held - limit + 1, now) });
            }
            if held == 0 {
                self.pace().begins(now);
            }
        }
        let take = |of: &Option<Allowance>, amount: u64, what, limit: Option<u64>| match of {
            Some(allowance) => allowance.take(amount, now).map_err(|wait| Refused::Rate { what, limit: limit.unwrap_or_default(), wait }),
            None => Ok(()),
        };
        take(&meters.input, u64::from(input), What::InputTokens, limits.input_tokens_per_minute)?;
        admission.input = u64::from(input);
        if output > 0 {
            take(&meters.output, output, What::OutputTokens, limits.output_tokens_per_minute)?;
        }
        admission.output = output;
        // Last: a request cannot be given back, since it was one whatever became of it.
        take(&meters.requests, 1, What::Requests, limits.requests_per_minute)?;
        Ok(admission)
    }

    fn pace(&self) -> MutexGuard<'_, Pace> {
        self.held.pace.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Tenant {
    /// How its limits per minute stand.
    pub fn standing(&self) -> impl Iterator<Item = (What, Standing)> {
        let now = Instant::now();
        let Meters { requests, input, output, .. } = &*self.meters;
        let each = [(What::Requests, requests), (What::InputTokens, input), (What::OutputTokens, output)];
        each.into_iter().filter_map(move |(what, allowance)| Some((what, allowance.as_ref()?.standing(now))))
    }

    /// How the limits stand, in headers as OpenAI sends them. Of the two kinds of tokens, the one of which a smaller share is left.
    pub fn explain(&self, headers: &mut HeaderMap) {
        let share = |standing: &Standing| standing.left as f64 / standing.per_minute as f64;
        let mut tokens: Option<Standing> = None;
        for (what, standing) in self.standing() {
            match what {
                What::Requests => set(headers, &REQUEST_HEADERS, standing),
                What::InputTokens | What::OutputTokens => {
                    tokens = tokens.filter(|tokens| share(tokens) <= share(&standing)).or(Some(standing));
                }
            }
        }
        if let Some(tokens) = tokens {
            set(headers, &TOKEN_HEADERS, tokens);
        }
    }
}

impl Meters {
    fn new(limits: TenantLimits, now: Instant) -> Meters {
        let allowance = |limit: Option<u64>| limit.map(|limit| Allowance::new(limit, now));
        Meters {
            limits,
            requests: allowance(limits.requests_per_minute),
            input: allowance(limits.input_tokens_per_minute),
            output: allowance(limits.output_tokens_per_minute),
            typical: Mutex::new(ASSUMED_OUTPUT),
        }
    }

    fn settle(&self, of: &Option<Allowance>, reserved: u64, used: u64) {
        if let Some(allowance) = of {
            allowance.settle(reserved, used, Instant::now());
        }
    }
}

/// What one request holds of its tenant's limits.
pub struct Admission {
    tenant: Arc<Tenant>,
    meters: Arc<Meters>,
    /// Tokens reserved.
    input: u64,
    output: u64,
    since: Instant,
}

impl Admission {
    /// The request ran, and used so many tokens of each kind; where its backend did not count the prompt, the estimate stands.
    pub fn used(mut self, input: Option<Tokens>, output: Tokens) {
        let (reserved_input, reserved_output) = (std::mem::take(&mut self.input), std::mem::take(&mut self.output));
        self.meters.settle(&self.meters.input, reserved_input, input.map_or(reserved_input, u64::from));
        self.meters.settle(&self.meters.output, reserved_output, u64::from(output));
        // What was cut off before its first token says nothing of how long answers are.
        if output > 0 {
            let mut typical = self.meters.typical.lock().unwrap_or_else(PoisonError::into_inner);
            *typical += (f64::from(output) - *typical) * NEWEST;
        }
    }
}

/// OpenAI's headers: the limit, what is left of it, and when it is whole again.
const REQUEST_HEADERS: [HeaderName; 3] = [
    HeaderName::from_static("x-ratelimit-limit-requests"),
    HeaderName::from_static("x-ratelimit-remaining-requests"),
    HeaderName::from_static("x-ratelimit-reset-requests"),
];
const TOKEN_HEADERS: [HeaderName; 3] = [
    HeaderName::from_static("x-ratelimit-limit-tokens"),
    HeaderName::from_static("x-ratelimit-remaining-tokens"),
    HeaderName::from_static("x-ratelimit-reset-tokens"),
];

fn set(headers: &mut HeaderMap, names: &[HeaderName; 3], standing: Standing) {
    let [limit, left, reset] = names;
    headers.insert(limit, HeaderValue::from(standing.per_minute));
    headers.insert(left, HeaderValue::from(standing.left));
    // Digits, a dot and an s are a header value.
    if let Ok(value) = HeaderValue::try_from(format!("{:.3}s", standing.full_in.as_secs_f64())) {
        headers.insert(reset, value);
    }
}

impl Drop for Admission {
    fn drop(&mut self) {
        self.meters.settle(&self.meters.input, self.input, 0);
        self.meters.settle(&self.meters.output, self.output, 0);
        self.tenant.held.requests.fetch_sub(1, Ordering::Relaxed);
        if self.tenant.settings.limits.concurrent_requests.is_some() {
            let now = Instant::now();
            self.tenant.pace().left(now.saturating_duration_since(self.since), now);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::config::{QueueLimits, TenantKey};
    use crate::scheduler::Weight;

    const HERE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

    fn settings(name: &str, key: &str, limits: TenantLimits) -> Arc<TenantSettings> {
        let models = Some(BTreeSet::from(["llama".to_owned()]));
        Arc::new(TenantSettings {
            name: name.into(),
            weight: Weight::ONE,
            max_priority: Priority::Normal,
            models,
            limits,
            queue: QueueLimits::default(),
            keys: vec![TenantKey { hash: KeyHash::of(key.as_bytes()), queue: QueueLimits::default() }],
        })
    }

    fn keys<const N: usize>(tenants: [Arc<TenantSettings>; N]) -> KeySettings {
        KeySettings { tenants: tenants.into(), unknown_per_minute: 3 }
    }

    fn headers(name: &'static str, value: &'static str) -> HeaderMap {
        HeaderMap::from_iter([(HeaderName::from_static(name), HeaderValue::from_static(value))])
    }

    #[tokio::test(start_paused = true)]
    async fn a_key_in_any_of_its_headers_names_the_tenant() {
        let tenancy = Tenancy::new(
            &keys([settings("a", "hw-a", TenantLimits::default()), settings("b", "hw-b", TenantLimits::default())]),
            None,
            Instant::now(),
        );
        let who = |headers: HeaderMap| tenancy.who(&headers, HERE).map(|known| known.tenant.name().to_owned());
        for (name, value) in [("authorization", "Bearer hw-b"), ("authorization", "bearer  hw-b "), ("x-api-key", "hw-b"), ("api-key", "hw-b")] {
            assert_eq!(who(headers(name, value)), Ok("b".into()), "{name}: {value}");
        }
        assert_eq!(who(HeaderMap::new()), Err(Refused::NoKey));
        assert_eq!(who(headers("authorization", "Basic aHctYjpody1i")), Err(Refused::NoKey));
        assert_eq!(who(headers("authorization", "Bearer hw-c")), Err(Refused::UnknownKey));
        assert_eq!(who(headers("authorization", "Bearer ")), Err(Refused::UnknownKey));
        let tenant = &tenancy.who(&headers("x-api-key", "hw-a"), HERE).unwrap().tenant;
        assert!(tenant.may_use("llama") && !tenant.may_use("qwen"));
    }

    #[tokio::test(start_paused = true)]
    async fn unknown_keys_are_slowed_down_and_known_ones_from_the_same_address_never() {
        let one = keys([settings("a", "hw-a", TenantLimits::default())]);
        let first = Tenancy::new(&one, None, Instant::now());
        // What was counted goes on over a reload.
        let second = Tenancy::new(&one, Some(&first), Instant::now());
        let from = IpAddr::from([10, 0, 0, 1]);
        let who = |tenancy: &Tenancy, key, from| tenancy.who(&headers("x-api-key", key), from).map(|known| known.tenant.name().to_owned());
        for tenancy in [&first, &second, &first] {
            assert_eq!(who(tenancy, "hw-wrong", from), Err(Refused::UnknownKey));
        }
        for _ in 0..100 {
            let refused = who(&second, "hw-wrong", from).unwrap_err();
            assert_eq!(refused, Refused::UnknownKeys { limit: 3, wait: Duration::from_secs(20) });
            assert_eq!(refused.retry_after(), Some(20));
            assert_eq!(who(&second, "hw-a", from), Ok("a".into()));
        }
        assert_eq!(who(&second, "hw-wrong", HERE), Err(Refused::UnknownKey), "another address");
        tokio::time::advance(Duration::from_secs(20)).await;
        assert_eq!(who(&second, "hw-wrong", from), Err(Refused::UnknownKey));
    }

    #[tokio::test(start_paused = true)]
    async fn a_refusal_takes_nothing_and_an_end_gives_back() {
        let limits = TenantLimits {
            requests_per_minute: Some(6),
            input_tokens_per_minute: Some(600),
            output_tokens_per_minute: Some(600),
            concurrent_requests: Some(2),
        };
        let now = Instant::now();
        let tenancy = Tenancy::new(&keys([settings("a", "k", limits)]), None, now);
        let tenant = tenancy.tenants().next().unwrap();
        let first = tenant.admit(100, 50, now).unwrap();
        let too_much = tenant.admit(550, 50, now).err();
        assert_eq!(too_much, Some(Refused::Rate { what: What::InputTokens, limit: 600, wait: Duration::from_secs(5) }));
        let second = tenant.admit(100, Tokens::MAX, now).unwrap();
        assert_eq!(tenant.admit(1, Tokens::MAX, now).err(), Some(Refused::Concurrent { limit: 2, wait: Duration::ZERO }));
        let left = |of: &Option<Allowance>| of.as_ref().unwrap().standing(now).left;
        let meters = &tenant.meters;
        assert_eq!((left(&meters.requests), left(&meters.input), left(&meters.output)), (4, 400, 600 - 50 - 256));
        // The first ran and produced more than it had reserved; the second was never sent.
        first.used(Some(120), 90);
        drop(second);
        assert_eq!((left(&meters.requests), left(&meters.input), left(&meters.output)), (4, 480, 510));
        assert_eq!(tenant.held(), 0);
        let typical = *meters.typical.lock().unwrap();
        assert!((typical - (256.0 - 166.0 * NEWEST)).abs() < 1e-9, "{typical}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_reload_keeps_what_was_counted_unless_the_limits_changed() {
        let now = Instant::now();
        let limits = |requests| TenantLimits { requests_per_minute: Some(requests), ..TenantLimits::default() };
        let first = Tenancy::new(&keys([settings("a", "k", limits(2)), settings("b", "l", limits(2))]), None, now);
        let of = |tenancy: &Tenancy, name: &str| Arc::clone(&tenancy.tenants[name]);
        let held = of(&first, "a").admit(1, Tokens::MAX, now).unwrap();
        of(&first, "b").admit(1, Tokens::MAX, now).unwrap();
        let second = Tenancy::new(
            &keys([settings("c", "m", limits(2)), settings("a", "new key", limits(2)), settings("b", "l", limits(1))]),
            Some(&first),
            now,
        );
        assert_eq!(of(&second, "a").id(), of(&first, "a").id());
        assert_eq!(second.tenants().map(|tenant| tenant.id()).collect::<std::collections::BTreeSet<_>>().len(), 3);
        assert_eq!(of(&second, "a").held(), 1);
        assert!(
            of(&second, "a").admit(1, Tokens::MAX, now).is_ok() && of(&second, "a").admit(1, Tokens::MAX, now).is_err(),
            "one of two was taken before"
        );
        assert!(
            of(&second, "b").admit(1, Tokens::MAX, now).is_ok() && of(&second, "b").admit(1, Tokens::MAX, now).is_err(),
            "another limit is another bucket"
        );
        assert!(second.who(&headers("x-api-key", "k"), HERE).is_err(), "the old key is gone");
        drop(held);
        assert_eq!(of(&second, "a").held(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn one_too_many_at_once_is_told_when_one_will_have_ended() {
        let limits = |most| TenantLimits { concurrent_requests: Some(most), ..TenantLimits::default() };
        let tenancy = |most, before| Tenancy::new(&keys([settings("a", "k", limits(most))]), before, Instant::now());
        let first = tenancy(2, None);
        let admit = |tenancy: &Tenancy| tenancy.tenants["a"].admit(1, Tokens::MAX, Instant::now());
        let told = |tenancy: &Tenancy| admit(tenancy).err().and_then(|refused| refused.retry_after());
        let mut running = std::collections::VecDeque::from([admit(&first).unwrap(), admit(&first).unwrap()]);
        assert_eq!(told(&first), Some(1), "none has ended, and none has run for long");
        for _ in 0..10 {
            tokio::time::advance(Duration::from_secs(4)).await;
            assert!(told(&first) <= Some(4), "who is refused does not count as one that ended");
            running.pop_front();
            running.push_back(admit(&first).unwrap());
        }
        let refused = admit(&first).err().unwrap();
        assert_eq!(refused.retry_after(), Some(4));
        assert!(refused.to_string().ends_with("; try again in 4 s"), "{refused}");
        tokio::time::advance(Duration::from_secs(1)).await;
        let second = tenancy(1, Some(&first));
        assert_eq!((told(&first), told(&second)), (Some(3), Some(7)), "of the lower limit, two have to end");
    }

    #[tokio::test(start_paused = true)]
    async fn headers_are_those_of_openai() {
        let limits = TenantLimits {
            requests_per_minute: Some(60),
            input_tokens_per_minute: Some(1000),
            output_tokens_per_minute: Some(600),
            concurrent_requests: None,
        };
        let tenancy = Tenancy::new(&keys([settings("a", "k", limits)]), None, Instant::now());
        let tenant = tenancy.tenants().next().unwrap();
        let _admission = tenant.admit(100, 300, Instant::now()).unwrap();
        let mut headers = HeaderMap::new();
        tenant.explain(&mut headers);
        let shown: Vec<(&str, &str)> = headers.iter().map(|(name, value)| (name.as_str(), value.to_str().unwrap())).collect();
        let expected = [
            ("x-ratelimit-limit-requests", "60"),
            ("x-ratelimit-remaining-requests", "59"),
            ("x-ratelimit-reset-requests", "1.000s"),
            ("x-ratelimit-limit-tokens", "600"),
            ("x-ratelimit-remaining-tokens", "344"),
            ("x-ratelimit-reset-tokens", "25.600s"),
        ];
        assert_eq!(shown, expected);
    }
}
