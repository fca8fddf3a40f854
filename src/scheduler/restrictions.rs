//! Which backends a waiting request may not go to. Few requests have any, and those few share a handful of sets: each set is stored once.

use std::collections::BTreeMap;

use super::event::BackendId;

/// A restriction; [`RestrictionId::NONE`] is no restriction at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct RestrictionId(u32);

impl RestrictionId {
    pub const NONE: RestrictionId = RestrictionId(0);
    /// No id comes after it.
    pub const LAST: RestrictionId = RestrictionId(u32::MAX);
}

/// Backends that a request may not go to, each list sorted and without duplicates.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Restriction {
    /// Already tried, says the request.
    pub excluded: Vec<BackendId>,
    /// Too small for it.
    pub too_small: Vec<BackendId>,
}

impl Restriction {
    pub fn bars(&self, backend: BackendId) -> bool {
        self.excluded.binary_search(&backend).is_ok() || self.too_small.binary_search(&backend).is_ok()
    }
}

/// Every restriction in use.
#[derive(Debug)]
pub(super) struct Restrictions {
    /// By id; the first is empty.
    all: Vec<Restriction>,
    ids: BTreeMap<Restriction, RestrictionId>,
}

impl Restrictions {
    pub fn new() -> Self {
        Restrictions { all: vec![Restriction::default()], ids: BTreeMap::new() }
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.all.len() == 1
    }

    /// The id of a restriction.
    pub fn intern(&mut self, mut restriction: Restriction) -> RestrictionId {
        for list in [&mut restriction.excluded, &mut restriction.too_small] {
            list.sort_unstable();
            list.dedup();
        }
        if restriction == self.all[0] {
            return RestrictionId::NONE;
        }
        if let Some(&id) = self.ids.get(&restriction) {
            return id;
        }
        let id = RestrictionId(self.all.len() as u32);
        self.all.push(restriction.clone());
        self.ids.insert(restriction, id);
        id
    }

    pub fn get(&self, id: RestrictionId) -> &Restriction {
        &self.all[id.0 as usize]
    }

    /// Forgets every restriction; to be called when no waiting request has one, since backends come and go and their ids are never reused.
    pub fn clear(&mut self) {
        *self = Self::new();
    }
}
