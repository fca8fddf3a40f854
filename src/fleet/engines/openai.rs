//! Anything that speaks the OpenAI API and tells nothing else of itself: what runs is counted here.

use crate::scheduler::Slots;

/// Without numbers to correct it, the window stays near what small servers batch.
pub(super) const SLOTS: Slots = Slots::Auto { initial: crate::config::DEFAULT_INITIAL_SLOTS, max: crate::config::DEFAULT_MAX_SLOTS };
