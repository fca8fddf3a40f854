//! Time as the core knows it: microseconds since the process (or the simulation) began.
//!
//! There is no way to ask the operating system here: whoever calls the scheduler says what time it is.

use std::time::Duration;

/// A point in time, in microseconds since an arbitrary start that all events of one scheduler share.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Time(u64);

impl Time {
    /// The start of time.
    pub const ZERO: Time = Time(0);
    /// A time later than any event; used as "never".
    pub const MAX: Time = Time(u64::MAX);

    /// `micros` microseconds after the start.
    pub const fn from_micros(micros: u64) -> Self {
        Time(micros)
    }

    /// Microseconds since the start.
    pub const fn as_micros(self) -> u64 {
        self.0
    }

    /// `secs` seconds after the start, rounded to the nearest microsecond; negative and NaN become the start, too large becomes [`Time::MAX`].
    pub fn from_secs_f64(secs: f64) -> Self {
        // A float-to-integer cast saturates and maps NaN to 0.
        Time((secs * 1e6).round() as u64)
    }

    /// Seconds since the start.
    pub fn as_secs_f64(self) -> f64 {
        self.0 as f64 / 1e6
    }

    /// How long after `earlier` this is; zero if it is not after it.
    pub fn since(self, earlier: Time) -> Duration {
        Duration::from_micros(self.0.saturating_sub(earlier.0))
    }

    /// This time plus `span`, saturating at [`Time::MAX`].
    pub fn after(self, span: Duration) -> Time {
        let micros = u64::try_from(span.as_micros()).unwrap_or(u64::MAX);
        Time(self.0.saturating_add(micros))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_are_rounded_to_what_a_time_can_be() {
        assert_eq!(Time::from_secs_f64(1.234_567_8), Time::from_micros(1_234_568));
        assert_eq!([-1.0, f64::NAN, 1e300].map(Time::from_secs_f64), [Time::ZERO, Time::ZERO, Time::MAX]);
        assert_eq!(Time::from_micros(2_500_000).as_secs_f64(), 2.5);
        assert_eq!(Time::from_micros(5).since(Time::from_micros(2)), Duration::from_micros(3));
        assert_eq!(Time::from_micros(2).since(Time::from_micros(5)), Duration::ZERO);
        assert_eq!(Time::from_micros(2).after(Duration::from_micros(3)), Time::from_micros(5));
        assert_eq!(Time::ZERO.after(Duration::MAX), Time::MAX);
    }
}
