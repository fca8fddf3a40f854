//! How many requests one backend may hold.

use super::event::{Slots, Standing};

/// A backend's release window. What is in flight counts from the release on; shrinking never cancels.
#[derive(Debug)]
pub(super) struct Window {
    slots: Slots,
    limit: u32,
}

impl Window {
    pub fn new(slots: Slots) -> Self {
        let limit = match slots {
            Slots::Fixed(limit) => limit,
            Slots::Auto { initial, max } => initial.min(max).max(1),
        };
        Window { slots, limit }
    }

    /// The setting changed; what was learnt stays as far as it fits.
    pub fn reconfigure(&mut self, slots: Slots) {
        if slots != self.slots {
            *self = Window::new(slots);
        }
    }

    /// How many requests the backend may hold in this standing.
    pub fn limit(&self, standing: Standing) -> u32 {
        match standing {
            Standing::Healthy => self.limit,
            Standing::Probing => self.limit.min(1),
            Standing::Ejected | Standing::Draining | Standing::Gone => 0,
        }
    }
}
