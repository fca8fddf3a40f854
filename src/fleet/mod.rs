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
