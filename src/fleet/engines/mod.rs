//! What differs between engine families: who they are, how they tell their load and capacity, what they forgive. One small file each.

mod llamacpp;
mod ollama;
mod openai;
mod sglang;
mod tgi;
mod vllm;

use std::time::Duration;

use serde_json::Value;

use super::health::Tolerance;
use super::http::{Http, HttpError};
use super::prometheus::{Page, Sample};
use crate::scheduler::{Load, Slots, Tokens};

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

    /// The engine's own `priority` request field; `None` where there is none.
    pub const fn priority(self) -> Option<Priority> {
        match self {
            EngineKind::Vllm => Some(vllm::PRIORITY),
            EngineKind::Sglang => Some(sglang::PRIORITY),
            EngineKind::Tgi | EngineKind::LlamaCpp | EngineKind::Ollama | EngineKind::OpenAi => None,
        }
    }

    /// Whether it goes on with an answer that was begun elsewhere: with the last message of a chat where the request says so, or with a plain prompt. Left out are
    /// engines that would put a template around the prompt (Ollama), and those of which it is not known.
    pub const fn continues(self, chat: bool) -> bool {
        match self {
            EngineKind::Vllm | EngineKind::Sglang | EngineKind::LlamaCpp => true,
            EngineKind::Tgi => !chat,
            EngineKind::Ollama | EngineKind::OpenAi => false,
        }
    }

    /// The path that a probe asks for.
    pub(super) const fn health_path(self) -> &'static str {
        match self {
            EngineKind::Vllm | EngineKind::Sglang | EngineKind::Tgi | EngineKind::LlamaCpp => "/health",
            EngineKind::Ollama => "/",
            EngineKind::OpenAi => "/v1/models",
        }
    }

    /// The path of the metrics page; `None` where there is none.
    pub(super) const fn metrics_path(self) -> Option<&'static str> {
        match self {
            EngineKind::Vllm | EngineKind::Sglang | EngineKind::Tgi | EngineKind::LlamaCpp => Some("/metrics"),
            EngineKind::Ollama | EngineKind::OpenAi => None,
        }
    }

    /// The engine's own numbers, from its metrics page.
    pub(super) fn load(self, page: Page) -> Load {
        match self {
            EngineKind::Vllm => vllm::load(page),
            EngineKind::Sglang => sglang::load(page),
            EngineKind::Tgi => tgi::load(page),
            EngineKind::LlamaCpp => llamacpp::load(page),
            EngineKind::Ollama | EngineKind::OpenAi => Load::default(),
        }
    }

    /// How much it may stumble before it counts as broken.
    pub(super) const fn tolerance(self) -> Tolerance {
        match self {
            EngineKind::Vllm => vllm::TOLERANCE,
            EngineKind::Sglang => sglang::TOLERANCE,
            EngineKind::Tgi | EngineKind::LlamaCpp | EngineKind::Ollama | EngineKind::OpenAi => TOLERANCE,
        }
    }

    /// The window of `slots: auto`, given what the engine said of itself.
    pub(super) fn auto_slots(self, own: Option<u32>) -> Slots {
        match (self, own) {
            // Two more than it can run: its own queue then holds the next ones, and a slot never waits for the network.
            (_, Some(own)) => Slots::Auto { initial: own, max: own.saturating_add(2) },
            (EngineKind::Ollama, None) => ollama::SLOTS,
            (EngineKind::OpenAi, None) => openai::SLOTS,
            (_, None) => UNKNOWN_SLOTS,
        }
    }
}

/// The window of an engine that says nothing of itself: a low start, and its waiting metric to grow by.
pub(super) const UNKNOWN_SLOTS: Slots = Slots::Auto { initial: crate::config::DEFAULT_INITIAL_SLOTS, max: crate::config::DEFAULT_MAX_SLOTS };

/// What is forgiven where nothing special is known.
pub(super) const TOLERANCE: Tolerance = Tolerance { errors: 5, doubts: 3 };

/// How an engine's own `priority` field is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Priority {
    /// Whether the smaller number runs first.
    pub lower_first: bool,
    /// Span of the queue key that one step stands for. Coarse: near-equal keys should share a level, so that prefix caches and batches survive.
    pub unit: Duration,
}

/// What an engine says about its size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Capacity {
    /// Requests it runs at once.
    pub slots: Option<u32>,
    /// Tokens that fit its KV cache.
    pub kv_tokens: Option<u64>,
    /// Longest context, prompt and output together.
    pub context_tokens: Option<Tokens>,
    /// Whether it keeps the beginnings of prompts.
    pub prefix_cache: Option<bool>,
}

impl Capacity {
    pub(super) fn or(self, earlier: Capacity) -> Capacity {
        Capacity {
            slots: self.slots.or(earlier.slots),
            kv_tokens: self.kv_tokens.or(earlier.kv_tokens),
            context_tokens: self.context_tokens.or(earlier.context_tokens),
            prefix_cache: self.prefix_cache.or(earlier.prefix_cache),
        }
    }
}

/// What a look at a backend found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Identity {
    pub kind: EngineKind,
    pub models: Vec<String>,
    pub capacity: Capacity,
}

/// How long one question of a look may take.
const QUESTION: Duration = Duration::from_secs(2);

/// Finds out what runs there. `known` skips the question which family it is.
///
/// # Errors
/// The first question, for the models, got no answer at all. Later ones that fail only leave gaps.
pub(super) async fn identify(http: &mut Http, known: Option<EngineKind>) -> Result<Identity, HttpError> {
    let models = http.get("/v1/models", QUESTION).await?.json().unwrap_or_default();
    let kind = match known.or_else(|| owner(&models)) {
        Some(kind) => kind,
        None => by_other_signs(http).await,
    };
    let capacity = match kind {
        EngineKind::Vllm => vllm::capacity(http, &models).await,
        EngineKind::Sglang => sglang::capacity(http, &models).await,
        EngineKind::Tgi => tgi::capacity(http).await,
        EngineKind::LlamaCpp => llamacpp::capacity(http).await,
        EngineKind::Ollama | EngineKind::OpenAi => Capacity::default(),
    };
    Ok(Identity { kind, models: names(&models), capacity })
}

/// The `data` of a model list.
fn entries(models: &Value) -> &[Value] {
    models["data"].as_array().map_or(&[], Vec::as_slice)
}

fn names(models: &Value) -> Vec<String> {
    // A list that goes on and on would be kept and shown: the first thousand are enough to route by.
    entries(models).iter().filter_map(|entry| entry["id"].as_str()).take(1000).map(str::to_owned).collect()
}

/// The `owned_by` that each family writes into its model list.
fn owner(models: &Value) -> Option<EngineKind> {
    entries(models).iter().find_map(|entry| match entry["owned_by"].as_str()? {
        "vllm" => Some(EngineKind::Vllm),
        "sglang" => Some(EngineKind::Sglang),
        "llamacpp" => Some(EngineKind::LlamaCpp),
        "library" => Some(EngineKind::Ollama),
        _ => None,
    })
}

/// For engines behind a list that names somebody else: metrics, then paths that only one family has.
async fn by_other_signs(http: &mut Http) -> EngineKind {
    if let Ok(answer) = http.get("/metrics", QUESTION).await
        && let Some(text) = answer.text()
    {
        let page = Page::new(&text);
        let prefixes = [("vllm:", EngineKind::Vllm), ("sglang:", EngineKind::Sglang), ("llamacpp:", EngineKind::LlamaCpp), ("tgi_", EngineKind::Tgi)];
        if let Some((_, kind)) = prefixes.into_iter().find(|(prefix, _)| page.mentions(prefix)) {
            return kind;
        }
    }
    /// Whether an answer could only come from one family.
    type Tells = fn(&[u8]) -> bool;
    let signs: [(&str, Tells, EngineKind); 4] = [
        ("/props", llamacpp::props, EngineKind::LlamaCpp),
        ("/info", tgi::info, EngineKind::Tgi),
        ("/", ollama::greeting, EngineKind::Ollama),
        ("/version", vllm::version, EngineKind::Vllm),
    ];
    for (path, tells, kind) in signs {
        if let Ok(answer) = http.get(path, QUESTION).await
            && answer.status.is_success()
            && tells(&answer.body)
        {
            return kind;
        }
    }
    EngineKind::OpenAi
}

/// The smallest `max_model_len` of a list: what every model of the backend can do. vLLM and SGLang write it.
fn max_model_len(models: &Value) -> Option<Tokens> {
    entries(models).iter().filter_map(|entry| tokens(&entry["max_model_len"])).min()
}

/// A count of tokens in JSON; zero means nothing.
fn tokens(value: &Value) -> Option<Tokens> {
    value.as_u64().and_then(|number| Tokens::try_from(number).ok()).filter(|number| *number > 0)
}

/// The sum over data-parallel ranks. `rank` is the label that tells them apart; series of one rank that differ in other labels (tensor-parallel
/// workers) repeat the same number, and the largest counts.
fn sum(samples: impl Iterator<Item = f64>) -> Option<u32> {
    let mut samples = samples.filter(|value| value.is_finite() && *value >= 0.0).peekable();
    samples.peek()?;
    // Saturates.
    Some(samples.sum::<f64>().round() as u32)
}

/// The average over data-parallel ranks, as a share.
fn mean(samples: impl Iterator<Item = f64>) -> Option<f32> {
    let (sum, count) = samples.filter(|value| value.is_finite()).fold((0.0, 0_u32), |(sum, count), value| (sum + value, count + 1));
    (count > 0).then(|| (sum / f64::from(count)).clamp(0.0, 1.0) as f32)
}

/// One value per rank: the largest of the series that share the label `rank`.
fn per_rank<'a>(samples: impl Iterator<Item = Sample<'a>>, rank: &str) -> Vec<f64> {
    let mut ranks: Vec<(String, f64)> = Vec::new();
    for sample in samples {
        let name = sample.label(rank).unwrap_or_default();
        match ranks.iter_mut().find(|(known, _)| known == name) {
            Some((_, value)) => *value = value.max(sample.value),
            None => ranks.push((name.to_owned(), sample.value)),
        }
    }
    ranks.into_iter().map(|(_, value)| value).collect()
}
