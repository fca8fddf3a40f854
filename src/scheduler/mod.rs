//! Who waits, where, and who goes next. Told, not asking: no IO, no clock, no async, and it cannot fail (it can refuse).

mod event;
mod outcome;
mod policy;
mod score;
mod time;

pub use event::*;
pub use outcome::{Ending, Reason};
pub use policy::{Gamma, Limits, MaxOvertake, Order, Policy, PolicyError, PolicyParts, Target};
pub use score::{RankerVersion, Score, Scored, Weight};
pub use time::Time;
