//! Exactly what users write, and where they wrote it. Every field is described in docs/configuration.md; a test holds the two together.
//!
//! Leaves stay text until [`super::validate`] reads them: so `${NAME}` works everywhere, and one look reports all mistakes of a file instead of the first.

use std::fmt;
use std::marker::PhantomData;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use serde::Deserialize;
use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserializer, Error, MapAccess, Visitor};
use serde_yaml::Spanned;

use super::snapshot::{BackendUrl, Device, Sessions};
use super::text::{Bytes, Endpoint};
use crate::fleet::EngineKind;
use crate::scheduler::{Order, Target, Weight};
use crate::tenancy::Priority;

/// The configuration file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct File {
    pub listen: Option<Leaf<SocketAddr>>,
    pub admin: Option<Leaf<SocketAddr>>,
    pub threads: Option<Leaf<u64>>,
    pub tls: Option<Tls>,
    pub policy: Option<Leaf<String>>,
    pub ranker: Option<Ranker>,
    pub telemetry: Option<Telemetry>,
    #[serde(default, deserialize_with = "written")]
    pub keys: Option<Keys>,
    pub training_log: Option<TrainingLog>,
    pub usage_log: Option<UsageLog>,
    pub access_log: Option<AccessLog>,
    pub state: Option<Leaf<PathBuf>>,
    pub edge: Option<Edge>,
    pub limits: Option<Limits>,
    pub timeouts: Option<Timeouts>,
    pub pools: Spanned<Vec<Pool>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Tls {
    pub cert: Leaf<PathBuf>,
    pub key: Leaf<PathBuf>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Ranker {
    pub weights: Leaf<PathBuf>,
    pub device: Option<Leaf<Device>>,
    pub deadline: Option<Leaf<Duration>>,
    pub threads: Option<Leaf<u64>>,
    pub shadow: Option<Leaf<PathBuf>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Telemetry {
    pub otlp: Option<Otlp>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Otlp {
    pub endpoint: Leaf<Endpoint>,
    pub sample: Option<Leaf<f64>>,
    pub service_name: Option<Leaf<String>>,
}

/// A section that must not be empty where its name is written: leaving it empty by mistake would switch off what it stands for.
fn written<'de, D: Deserializer<'de>, T: Deserialize<'de>>(deserializer: D) -> Result<Option<T>, D::Error> {
    T::deserialize(deserializer).map(Some)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Keys {
    pub file: Leaf<PathBuf>,
    pub unknown_per_minute: Option<Leaf<u64>>,
}

/// The keys file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct KeysFile {
    pub tenants: Spanned<Vec<Tenant>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Tenant {
    pub name: Leaf<String>,
    pub weight: Option<Leaf<Weight>>,
    pub max_priority: Option<Leaf<Priority>>,
    pub models: Option<Spanned<Vec<Leaf<String>>>>,
    pub limits: Option<TenantLimits>,
    pub keys: Spanned<Vec<TextOr<Key>>>,
}

/// A key with limits of its own.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Key {
    pub sha256: Leaf<String>,
    pub limits: Option<QueueLimits>,
}

/// How much of a key or a model may wait.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct QueueLimits {
    pub queue_requests: Option<Leaf<u64>>,
    pub queue_bytes: Option<Leaf<Bytes>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct TenantLimits {
    pub requests_per_minute: Option<Leaf<u64>>,
    pub input_tokens_per_minute: Option<Leaf<u64>>,
    pub output_tokens_per_minute: Option<Leaf<u64>>,
    pub concurrent_requests: Option<Leaf<u64>>,
    pub queue_requests: Option<Leaf<u64>>,
    pub queue_bytes: Option<Leaf<Bytes>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct TrainingLog {
    pub file: Leaf<PathBuf>,
    pub max_size: Option<Leaf<Bytes>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct UsageLog {
    pub file: Leaf<PathBuf>,
    pub max_size: Option<Leaf<Bytes>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct AccessLog {
    pub file: Leaf<PathBuf>,
    pub max_size: Option<Leaf<Bytes>>,
    pub keep: Option<Leaf<u64>>,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Edge {
    pub max_body: Option<Leaf<Bytes>>,
    pub max_body_total: Option<Leaf<Bytes>>,
    pub max_head: Option<Leaf<Bytes>>,
    pub head_timeout: Option<Leaf<Duration>>,
    pub body_timeout: Option<Leaf<Duration>>,
    pub drain: Option<Leaf<Duration>>,
    pub half_close: Option<Leaf<bool>>,
    pub headers: Option<Leaf<bool>>,
    pub keepalive: Option<Leaf<Duration>>,
    pub sessions: Option<Leaf<Sessions>>,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Limits {
    pub queue_requests: Option<Leaf<u64>>,
    pub queue_bytes: Option<Leaf<Bytes>>,
    pub max_output: Option<Leaf<u64>>,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Timeouts {
    pub connect: Option<Leaf<Duration>>,
    pub queue: Option<Leaf<Duration>>,
    pub first_byte: Option<Leaf<Duration>>,
    pub inter_chunk: Option<Leaf<Duration>>,
    pub total: Option<Leaf<Duration>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Pool {
    pub name: Leaf<String>,
    pub models: Option<Spanned<Vec<TextOr<Model>>>>,
    pub fallback: Option<Spanned<Vec<Leaf<String>>>>,
    pub policy: Option<Leaf<String>>,
    pub backends: Spanned<Vec<Backend>>,
    pub limits: Option<Limits>,
    pub timeouts: Option<Timeouts>,
    pub retries: Option<Leaf<u64>>,
    pub retry_budget: Option<Leaf<u64>>,
    pub resume: Option<Leaf<bool>>,
    pub slow_stream: Option<SlowStream>,
    pub wedged_after: Option<Leaf<Duration>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SlowStream {
    pub tokens_per_second: Leaf<f64>,
    pub over: Option<Leaf<Duration>>,
}

/// A model name clients may ask for, when the backends know it by another.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Model {
    pub name: Leaf<String>,
    pub upstream: Option<Leaf<String>>,
    pub limits: Option<QueueLimits>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Backend {
    pub url: Leaf<BackendUrl>,
    pub engine: Option<Leaf<Option<EngineKind>>>,
    pub slots: Option<TextOr<Slots>>,
    pub weight: Option<Leaf<Weight>>,
    pub api_key: Option<Leaf<String>>,
    pub api_key_file: Option<Leaf<PathBuf>>,
    pub kv_tokens: Option<Leaf<u64>>,
    pub prefix_cache: Option<Leaf<bool>>,
    pub priority: Option<Leaf<bool>>,
}

/// The long form of `slots: auto`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Slots {
    pub initial: Option<Leaf<u64>>,
    pub max: Option<Leaf<u64>>,
}

/// A policy file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Policy {
    pub order: Leaf<Order>,
    pub gamma: Option<TextOr<Gamma>>,
    pub max_overtake: Option<Leaf<String>>,
    pub tenant_lead: Option<Leaf<String>>,
    pub aging: Option<Aging>,
    pub overload: Option<Leaf<bool>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Gamma {
    pub target: Option<Leaf<Target>>,
    pub ttft_p99: Option<Leaf<Duration>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Aging {
    pub threshold: Option<Leaf<Duration>>,
    pub share: Option<Leaf<f64>>,
}

/// The text of one value, where it stands, and what it will be read as.
pub(crate) struct Leaf<T> {
    pub text: Spanned<String>,
    kind: PhantomData<T>,
}

impl<'de, T> Deserialize<'de> for Leaf<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Spanned::deserialize(deserializer).map(|text| Leaf { text, kind: PhantomData })
    }
}

/// A short form that is one piece of text, or the long form.
pub(crate) enum TextOr<T> {
    Text(Spanned<String>),
    Long(T),
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for TextOr<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Spanned::<Form<T>>::deserialize(deserializer).map(|form| match form.value {
            Form::Text(text) => TextOr::Text(Spanned::new(text, form.referenced, form.defined)),
            Form::Long(long) => TextOr::Long(long),
        })
    }
}

enum Form<T> {
    Text(String),
    Long(T),
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Form<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct FormVisitor<T>(PhantomData<T>);

        impl<'de, T: Deserialize<'de>> Visitor<'de> for FormVisitor<T> {
            type Value = Form<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a single value or a mapping")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Form<T>, E> {
                Ok(Form::Text(text.to_owned()))
            }

            fn visit_i64<E: Error>(self, number: i64) -> Result<Form<T>, E> {
                Ok(Form::Text(number.to_string()))
            }

            fn visit_u64<E: Error>(self, number: u64) -> Result<Form<T>, E> {
                Ok(Form::Text(number.to_string()))
            }

            fn visit_f64<E: Error>(self, number: f64) -> Result<Form<T>, E> {
                Ok(Form::Text(number.to_string()))
            }

            fn visit_bool<E: Error>(self, value: bool) -> Result<Form<T>, E> {
                Ok(Form::Text(value.to_string()))
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Form<T>, A::Error> {
                T::deserialize(MapAccessDeserializer::new(map)).map(Form::Long)
            }
        }

        deserializer.deserialize_any(FormVisitor(PhantomData))
    }
}
