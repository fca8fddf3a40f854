//! What is known of the backends: what engine each runs, whether it answers, how loaded it is.

/// The engine families that differ in metric names, priority polarity or quirks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EngineKind {
    Vllm,
    Sglang,
    Tgi,
    LlamaCpp,
    Ollama,
    OpenAi,
}

impl EngineKind {
    /// Every family.
    pub const ALL: [EngineKind; 6] =
        [EngineKind::Vllm, EngineKind::Sglang, EngineKind::Tgi, EngineKind::LlamaCpp, EngineKind::Ollama, EngineKind::OpenAi];

    /// The name in configuration, metrics and the admin view.
    pub const fn as_str(self) -> &'static str {
        match self {
            EngineKind::Vllm => "vllm",
            EngineKind::Sglang => "sglang",
            EngineKind::Tgi => "tgi",
            EngineKind::LlamaCpp => "llamacpp",
            EngineKind::Ollama => "ollama",
            EngineKind::OpenAi => "openai",
        }
    }
}
