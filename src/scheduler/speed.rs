//! How fast a backend is: seconds of its capacity per token.

/// Seconds of capacity per token, that is 1 / (aggregate tokens per second at saturation); never the per-token time of one stream.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Speed {
    /// Per uncached prompt token (alpha).
    pub prompt: f64,
    /// Per output token (beta).
    pub output: f64,
}

impl Speed {
    /// What is assumed before anything was seen: 2,000 output tokens a second, prompts twenty times as fast.
    pub const ASSUMED: Speed = Speed { prompt: 2.5e-5, output: 5e-4 };

    /// Seconds of capacity that these tokens take.
    pub fn seconds(self, prompt: u64, output: u64) -> f64 {
        self.prompt * prompt as f64 + self.output * output as f64
    }
}
