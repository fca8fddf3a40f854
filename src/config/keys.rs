//! The keys file: who may ask, and for how much.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use super::error::ConfigError;
use super::parse::parse;
use super::raw::{self, Leaf, TextOr};
use super::snapshot::{TenantKey, TenantLimits, TenantSettings};
use super::text::{FromText, Mistake};
use super::validate::{Checker, Environment, Place, is_label};
use crate::scheduler::Weight;
use crate::tenancy::{KeyHash, Priority};

/// The largest limit that can be asked for.
const MOST: u64 = 1_000_000_000_000;

/// Reads a keys file; `served` are the names that clients may ask for, `None` where a pool takes any.
///
/// # Errors
/// Everything that is wrong with it.
pub(super) fn read(
    file: &Path,
    text: &str,
    served: Option<&BTreeSet<String>>,
    environment: Environment,
) -> Result<Vec<Arc<TenantSettings>>, ConfigError> {
    let raw: raw::KeysFile = parse(file, text)?;
    let mut reader = Reader { checker: Checker::new(file, environment), served, names: BTreeMap::new(), keys: BTreeMap::new() };
    let place = Place::root().key("tenants");
    if raw.tenants.value.is_empty() {
        let mistake = Mistake::new("there is no tenant, so nobody could ask for anything", "name one, or remove keys from the configuration");
        reader.checker.problem(raw.tenants.referenced, &place, mistake);
    }
    let tenants: Vec<_> =
        raw.tenants.value.iter().enumerate().filter_map(|(index, raw)| reader.tenant(raw, &place.index(index))).map(Arc::new).collect();
    reader.checker.finish()?;
    Ok(tenants)
}

struct Reader<'a> {
    checker: Checker<'a>,
    served: Option<&'a BTreeSet<String>>,
    /// The lines of names and of keys.
    names: BTreeMap<String, u64>,
    keys: BTreeMap<KeyHash, u64>,
}

impl Reader<'_> {
    fn tenant(&mut self, raw: &raw::Tenant, place: &Place) -> Option<TenantSettings> {
        let name = self.checker.read_text(&raw.name.text, &place.key("name"), |text| match is_label(text) {
            true => Ok(text.to_owned()),
            false => {
                Err(Mistake::new(format!("{text:?} is not a tenant's name"), "1 to 64 letters, digits, '-', '_' or '.': it becomes a metric label"))
            }
        });
        if let Some(name) = &name
            && let Some(line) = self.names.insert(name.clone(), raw.name.text.referenced.line())
        {
            let mistake = Mistake::new(format!("the tenant {name:?} is already on line {line}"), "put all of its keys into one entry");
            self.checker.problem(raw.name.text.referenced, &place.key("name"), mistake);
        }
        let weight = self.checker.optional(raw.weight.as_ref(), &place.key("weight"), Weight::ONE);
        if let Some(models) = raw.models.as_ref().filter(|models| models.value.is_empty()) {
            let mistake = Mistake::new("the tenant may use no model", "name some, or leave models out for all");
            self.checker.problem(models.referenced, &place.key("models"), mistake);
        }
        let models = raw.models.as_ref().map(|models| self.models(&models.value, &place.key("models")));
        let limits_place = place.key("limits");
        let limits = raw.limits.as_ref().map(|limits| self.limits(limits, &limits_place)).unwrap_or_default();
        let queue = raw.limits.as_ref().map(|limits| self.checker.queue_limits(&limits.queue_requests, &limits.queue_bytes, &limits_place));
        let keys_place = place.key("keys");
        if raw.keys.value.is_empty() {
            let mistake = Mistake::new("the tenant has no key", "make one with: headway key new");
            self.checker.problem(raw.keys.referenced, &keys_place, mistake);
        }
        let keys = raw.keys.value.iter().enumerate().filter_map(|(index, raw)| self.key(raw, &keys_place.index(index))).collect();
        let max_priority = self.checker.optional(raw.max_priority.as_ref(), &place.key("max_priority"), Priority::High);
        Some(TenantSettings { name: name?, weight, max_priority, models, limits, queue: queue.unwrap_or_default(), keys })
    }

    fn key(&mut self, raw: &TextOr<raw::Key>, place: &Place) -> Option<TenantKey> {
        let (text, place, limits) = match raw {
            TextOr::Text(text) => (text, place.clone(), None),
            TextOr::Long(key) => (&key.sha256.text, place.key("sha256"), key.limits.as_ref().map(|limits| (limits, place.key("limits")))),
        };
        let queue = limits.map(|(limits, place)| self.checker.queue_limits(&limits.queue_requests, &limits.queue_bytes, &place)).unwrap_or_default();
        let hash = self.checker.read_text(text, &place, |text| {
            // Never quoted back: it may be the key itself.
            text.trim().parse().map_err(|wrong: crate::tenancy::NotAHash| {
                Mistake::new(wrong.to_string(), "the SHA-256 of a key, as headway key new prints it; the key itself must not be in a file")
            })
        })?;
        if let Some(line) = self.keys.insert(hash, text.referenced.line()) {
            let mistake = Mistake::new(format!("this key is already on line {line}"), "a key belongs to one tenant");
            self.checker.problem(text.referenced, &place, mistake);
        }
        Some(TenantKey { hash, queue })
    }

    fn models(&mut self, raw: &[Leaf<String>], place: &Place) -> BTreeSet<String> {
        let mut models = BTreeSet::new();
        for (index, leaf) in raw.iter().enumerate() {
            let Some(model) = self.checker.read(leaf, &place.index(index)) else { continue };
            if let Some(served) = self.served.filter(|served| !served.contains(&model)) {
                let close = super::near(&model, served.iter().map(String::as_str)).first().map(|close| format!("did you mean {close}? "));
                let mistake = Mistake::new(
                    format!("no pool serves the model {model:?}"),
                    format!("{}names are as clients write them", close.unwrap_or_default()),
                );
                self.checker.problem(leaf.text.referenced, &place.index(index), mistake);
            }
            models.insert(model);
        }
        models
    }

    fn limits(&mut self, raw: &raw::TenantLimits, place: &Place) -> TenantLimits {
        let mut limit = |leaf: &Option<Leaf<u64>>, key: &str| {
            self.checker.read_text(&leaf.as_ref()?.text, &place.key(key), |text| match u64::from_text(text)? {
                limit @ 1..=MOST => Ok(limit),
                _ => Err(Mistake::new(format!("{text} is out of range"), format!("write 1 to {MOST}, or leave it out for no limit"))),
            })
        };
        TenantLimits {
            requests_per_minute: limit(&raw.requests_per_minute, "requests_per_minute"),
            input_tokens_per_minute: limit(&raw.input_tokens_per_minute, "input_tokens_per_minute"),
            output_tokens_per_minute: limit(&raw.output_tokens_per_minute, "output_tokens_per_minute"),
            concurrent_requests: limit(&raw.concurrent_requests, "concurrent_requests"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::QueueLimits;

    const A: &str = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
    const B: &str = "2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae";

    fn read_text(text: &str) -> Result<Vec<Arc<TenantSettings>>, ConfigError> {
        let served = BTreeSet::from(["llama".to_owned(), "qwen".to_owned()]);
        read(Path::new("keys.yaml"), text, Some(&served), &|_| None)
    }

    #[test]
    fn a_full_file_is_read_as_written() {
        let text = format!(
            "tenants:\n- name: search\n  weight: 2\n  models: [llama]\n  keys: [{A}, {{ sha256: {B}, limits: {{ queue_requests: 5 }} }}]\n  limits: {{ requests_per_minute: 1, input_tokens_per_minute: 2, output_tokens_per_minute: 3, concurrent_requests: 4, queue_bytes: 1MiB }}\n"
        );
        let tenants = read_text(&text).unwrap();
        let [tenant] = &*tenants else { panic!("{tenants:?}") };
        assert_eq!((tenant.name.as_str(), tenant.weight.get(), tenant.keys.len()), ("search", 2.0, 2));
        assert_eq!(tenant.models, Some(BTreeSet::from(["llama".into()])));
        assert_eq!(
            tenant.limits,
            TenantLimits {
                requests_per_minute: Some(1),
                input_tokens_per_minute: Some(2),
                output_tokens_per_minute: Some(3),
                concurrent_requests: Some(4)
            }
        );
        assert_eq!(tenant.queue, QueueLimits { requests: None, bytes: Some(1 << 20) });
        assert_eq!(tenant.keys.iter().map(|key| key.queue.requests).collect::<Vec<_>>(), [None, Some(5)]);
        let tenants = read_text(&format!("tenants: [{{ name: a, keys: [{A}] }}]")).unwrap();
        assert_eq!((&tenants[0].models, tenants[0].limits), (&None, TenantLimits::default()));
    }

    #[test]
    fn mistakes_are_shown_with_their_place_and_no_key_is_quoted() {
        let text = format!(
            "tenants:\n- {{ name: a b, keys: [hw-secret] }}\n- {{ name: c, keys: [{A}], models: [lama] }}\n- {{ name: c, keys: [{A}], limits: {{ requests_per_minute: 0 }} }}\n- {{ name: d, keys: [] }}\n- {{ name: e, keys: [{{ sha256: {B}, limits: {{ queue_bytes: 5 }} }}, {{ sha256: hw-secret }}] }}\n"
        );
        let error = read_text(&text).unwrap_err();
        let problems: Vec<(u64, &str)> = error.problems().iter().map(|problem| (problem.position.unwrap().0, problem.field.as_str())).collect();
        let expected = [
            (2, "tenants[0].name"),
            (2, "tenants[0].keys[0]"),
            (3, "tenants[1].models[0]"),
            (4, "tenants[2].name"),
            (4, "tenants[2].keys[0]"),
            (4, "tenants[2].limits.requests_per_minute"),
            (5, "tenants[3].keys"),
            (6, "tenants[4].keys[0].limits.queue_bytes"),
            (6, "tenants[4].keys[1].sha256"),
        ];
        assert_eq!(problems, expected);
        let shown = error.to_string();
        assert!(shown.contains("did you mean llama?") && shown.contains("already on line 3") && !shown.contains("secret"), "{shown}");
        assert!(read_text("tenants: []").unwrap_err().to_string().contains("nobody could ask"));
        assert!(read_text("tenant: []").unwrap_err().to_string().contains("did you mean tenants?"));
    }
}
