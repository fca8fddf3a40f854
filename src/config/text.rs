//! From the text of one value to a checked one: durations, sizes, addresses, URLs, numbers. Knows no YAML.

use std::net::{SocketAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use super::near::near;
use super::snapshot::{BackendUrl, Device, Sessions};
use crate::fleet::EngineKind;
use crate::scheduler::{Order, Target, Weight};
use crate::tenancy::Priority;

/// What is wrong with one value, and what to write instead.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message} ({hint})")]
pub struct Mistake {
    pub(crate) message: String,
    pub(crate) hint: String,
}

impl Mistake {
    pub(crate) fn new(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Mistake { message: message.into(), hint: hint.into() }
    }
}

/// A value that is written as one piece of text.
pub(crate) trait FromText: Sized {
    fn from_text(text: &str) -> Result<Self, Mistake>;
}

/// Where an OpenTelemetry collector takes OTLP over gRPC.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Endpoint(pub String);

/// A count of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Bytes(pub u64);

impl FromText for String {
    fn from_text(text: &str) -> Result<Self, Mistake> {
        if text.trim().is_empty() {
            return Err(Mistake::new("is empty", "write a value or leave the field out"));
        }
        Ok(text.to_owned())
    }
}

impl FromText for PathBuf {
    fn from_text(text: &str) -> Result<Self, Mistake> {
        String::from_text(text).map(PathBuf::from)
    }
}

impl FromText for bool {
    fn from_text(text: &str) -> Result<Self, Mistake> {
        match text {
            "true" => Ok(true),
            "false" => Ok(false),
            _ => Err(Mistake::new(format!("expected true or false, found {text:?}"), "write true or false")),
        }
    }
}

impl FromText for u64 {
    fn from_text(text: &str) -> Result<Self, Mistake> {
        text.parse().map_err(|_| Mistake::new(format!("expected a whole number, found {text:?}"), "write digits only, for example 64"))
    }
}

impl FromText for f64 {
    fn from_text(text: &str) -> Result<Self, Mistake> {
        match text.parse() {
            Ok(number) if f64::is_finite(number) => Ok(number),
            _ => Err(Mistake::new(format!("expected a number, found {text:?}"), "for example 0.25")),
        }
    }
}

impl FromText for Weight {
    fn from_text(text: &str) -> Result<Self, Mistake> {
        let number = f64::from_text(text)?;
        // A share a million times another's is a mistake, and keeps sums of weights exact enough.
        if !(1e-3..=1e3).contains(&number) {
            return Err(Mistake::new(format!("{number} is out of range"), "write a share between 0.001 and 1000; 1 is normal"));
        }
        Weight::new(number).ok_or_else(|| Mistake::new("is not a share", "1 is normal"))
    }
}

impl FromText for Priority {
    fn from_text(text: &str) -> Result<Self, Mistake> {
        Priority::named(text).ok_or_else(|| Mistake::new(format!("{text:?} is no priority"), "write low, normal or high"))
    }
}

impl FromText for Duration {
    fn from_text(text: &str) -> Result<Self, Mistake> {
        let mistake = || Mistake::new(format!("expected a duration, found {text:?}"), "write a number and a unit: 15ms, 2s, 5m, 1h30m");
        let mut rest = text.trim();
        let mut seconds = 0.0;
        if rest.is_empty() {
            return Err(mistake());
        }
        while !rest.is_empty() {
            let unit_at = rest.find(|c: char| !c.is_ascii_digit() && c != '.').ok_or_else(|| {
                Mistake::new(format!("the duration {text:?} has no unit"), format!("write {text}s for seconds or {text}ms for milliseconds"))
            })?;
            let number: f64 = rest[..unit_at].parse().map_err(|_| mistake())?;
            let tail = rest[unit_at..].trim_start();
            let unit_end = tail.find(|c: char| !c.is_alphabetic()).unwrap_or(tail.len());
            seconds += number
                * match &tail[..unit_end] {
                    "us" => 1e-6,
                    "ms" => 1e-3,
                    "s" => 1.0,
                    "m" | "min" => 60.0,
                    "h" => 3_600.0,
                    "d" => 86_400.0,
                    _ => return Err(mistake()),
                };
            rest = tail[unit_end..].trim_start();
        }
        // Microseconds are the resolution of every clock here; rounding to them makes 15ms exactly 15 ms.
        Ok(Duration::from_micros((seconds * 1e6).round() as u64))
    }
}

impl FromText for Bytes {
    fn from_text(text: &str) -> Result<Self, Mistake> {
        let mistake = || Mistake::new(format!("expected a size, found {text:?}"), "write a number and a unit: 512KiB, 30MiB, 2GiB (or plain bytes)");
        let trimmed = text.trim();
        let unit_at = trimmed.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(trimmed.len());
        let number: f64 = trimmed[..unit_at].parse().map_err(|_| mistake())?;
        let factor: f64 = match trimmed[unit_at..].trim_start() {
            "" | "B" => 1.0,
            "kB" | "KB" => 1e3,
            "MB" => 1e6,
            "GB" => 1e9,
            "TB" => 1e12,
            "KiB" => 1024.0,
            "MiB" => 1024.0 * 1024.0,
            "GiB" => 1024.0 * 1024.0 * 1024.0,
            "TiB" => 1024.0 * 1024.0 * 1024.0 * 1024.0,
            _ => return Err(mistake()),
        };
        Ok(Bytes((number * factor).round() as u64))
    }
}

impl FromText for SocketAddr {
    fn from_text(text: &str) -> Result<Self, Mistake> {
        if let Ok(address) = text.parse() {
            return Ok(address);
        }
        // `:8080` is common elsewhere and means every interface.
        if let Some(Ok(port)) = text.strip_prefix(':').map(u16::from_str) {
            return Ok(SocketAddr::from(([0, 0, 0, 0], port)));
        }
        if text.starts_with("localhost:")
            && let Some(address) = text.to_socket_addrs().ok().and_then(|mut all| all.find(SocketAddr::is_ipv4))
        {
            return Ok(address);
        }
        let hint = if text.parse::<std::net::IpAddr>().is_ok() {
            format!("add a port: {text}:8080")
        } else {
            "write address:port, for example 0.0.0.0:8080".into()
        };
        Err(Mistake::new(format!("expected an address and a port, found {text:?}"), hint))
    }
}

impl FromText for BackendUrl {
    fn from_text(text: &str) -> Result<Self, Mistake> {
        let example = "write http://host:port, for example http://10.0.0.1:8000";
        if text.contains('@') {
            return Err(Mistake::new(
                "a backend URL holds no user or password",
                "write http://host:port and put the secret into api_key or api_key_file",
            ));
        }
        if text.starts_with("https://") {
            return Err(Mistake::new(
                format!("{text} asks for TLS, and backends are spoken to in plain HTTP"),
                "write http:// and the port of the plain listener",
            ));
        }
        let Some(rest) = text.strip_prefix("http://") else {
            let hint = if text.contains("://") { example.to_owned() } else { format!("write http://{text}") };
            return Err(Mistake::new(format!("expected a URL that starts with http://, found {text:?}"), hint));
        };
        let (authority, path) = rest.find('/').map_or((rest, ""), |slash| rest.split_at(slash));
        if path.contains(['?', '#']) || path.chars().any(|c| c.is_whitespace() || c.is_control()) {
            return Err(Mistake::new(format!("{text:?} holds more than an address and a path"), example));
        }
        let path = path.trim_end_matches('/');
        if path.ends_with("/v1") {
            let base = text.trim_end_matches('/').trim_end_matches("/v1");
            return Err(Mistake::new("the URL ends in /v1, which every request's path already begins with", format!("write {base}")));
        }
        let (host, port) = host_and_port(authority, 80, example)?;
        Ok(BackendUrl { host, port, prefix: path.to_owned() })
    }
}

/// Reads `host` or `host:port`.
fn host_and_port(authority: &str, default: u16, example: &str) -> Result<(String, u16), Mistake> {
    let (host, port) = match authority.rfind(':') {
        // The colon belongs to an IPv6 address when its bracket closes after it.
        Some(colon) if !authority[colon..].contains(']') => {
            let port = authority[colon + 1..].parse().ok().filter(|port| *port != 0);
            let port =
                port.ok_or_else(|| Mistake::new(format!("{:?} is not a port", &authority[colon + 1..]), "a port is a number from 1 to 65535"))?;
            (&authority[..colon], port)
        }
        _ => (authority, default),
    };
    let named = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    let valid = match host.strip_prefix('[').and_then(|inner| inner.strip_suffix(']')) {
        Some(address) => address.parse::<std::net::Ipv6Addr>().is_ok(),
        None => !host.is_empty() && host.chars().all(named),
    };
    if !valid {
        return Err(Mistake::new(format!("{host:?} is not a host name or address"), example));
    }
    Ok((host.to_ascii_lowercase(), port))
}

impl FromText for Endpoint {
    fn from_text(text: &str) -> Result<Self, Mistake> {
        let example = "write http://host:port, for example http://localhost:4317";
        if text.contains('@') {
            return Err(Mistake::new("the address of a collector holds no user or password", "put headers for it into OTEL_EXPORTER_OTLP_HEADERS"));
        }
        if text.starts_with("https://") {
            return Err(Mistake::new(
                format!("{text} asks for TLS, and collectors are spoken to in plain gRPC"),
                "write http:// and the address of a collector on this machine or network; it can send on with TLS",
            ));
        }
        let Some(authority) = text.strip_prefix("http://") else {
            let hint = if text.contains("://") { example.to_owned() } else { format!("write http://{text}") };
            return Err(Mistake::new(format!("expected a URL that starts with http://, found {text:?}"), hint));
        };
        let authority = authority.trim_end_matches('/');
        if authority.contains(['/', '?', '#']) {
            return Err(Mistake::new(format!("{text:?} holds more than an address: gRPC has no path"), example));
        }
        let (host, port) = host_and_port(authority, 4317, example)?;
        Ok(Endpoint(format!("http://{host}:{port}")))
    }
}

impl FromStr for BackendUrl {
    type Err = Mistake;

    fn from_str(text: &str) -> Result<Self, Mistake> {
        BackendUrl::from_text(text)
    }
}

impl FromText for Device {
    fn from_text(text: &str) -> Result<Self, Mistake> {
        match text {
            "auto" => Ok(Device::Auto),
            "cpu" => Ok(Device::Cpu),
            "cuda" => Ok(Device::Cuda(0)),
            _ => text
                .strip_prefix("cuda:")
                .and_then(|ordinal| ordinal.parse().ok())
                .map(Device::Cuda)
                .ok_or_else(|| Mistake::new(format!("{text:?} is not a device"), "write auto, cpu, cuda, or cuda:1 for the second GPU")),
        }
    }
}

impl FromText for Option<EngineKind> {
    fn from_text(text: &str) -> Result<Self, Mistake> {
        let engines: Vec<(&str, Self)> =
            std::iter::once(("auto", None)).chain(EngineKind::ALL.into_iter().map(|kind| (kind.as_str(), Some(kind)))).collect();
        choice("engine", text, &engines)
    }
}

impl FromText for Order {
    fn from_text(text: &str) -> Result<Self, Mistake> {
        let orders = [
            ("fcfs", Order::Fcfs),
            ("pars", Order::Pars),
            ("uniboost", Order::Uniboost),
            ("headway", Order::Headway),
            ("oracle-sjf", Order::OracleSjf),
            ("oracle-boost", Order::OracleBoost),
        ];
        choice("order", text, &orders)
    }
}

impl FromText for Sessions {
    fn from_text(text: &str) -> Result<Self, Mistake> {
        choice("way to name sessions", text, &[("off", Sessions::Off), ("named", Sessions::Named), ("user", Sessions::User)])
    }
}

impl FromText for Target {
    fn from_text(text: &str) -> Result<Self, Mistake> {
        choice("target", text, &[("mean", Target::Mean), ("balanced", Target::Balanced), ("tail", Target::Tail)])
    }
}

/// One of a few words.
pub(crate) fn choice<T: Clone>(what: &str, text: &str, all: &[(&str, T)]) -> Result<T, Mistake> {
    if let Some((_, value)) = all.iter().find(|(name, _)| *name == text) {
        return Ok(value.clone());
    }
    let names: Vec<&str> = all.iter().map(|(name, _)| *name).collect();
    let hint = match near(text, names.iter().copied()).first() {
        Some(close) => format!("did you mean {close}? There are: {}", names.join(", ")),
        None => format!("there are: {}", names.join(", ")),
    };
    Err(Mistake::new(format!("{text:?} is not a known {what}"), hint))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations() {
        for (text, micros) in
            [("15ms", 15_000), ("2m", 120_000_000), ("1h30m", 5_400_000_000), ("1.5s", 1_500_000), ("250us", 250), ("0s", 0), ("2 s", 2_000_000)]
        {
            assert_eq!(Duration::from_text(text).unwrap(), Duration::from_micros(micros), "{text}");
        }
        for text in ["", "ms", "15", "15 parsecs", "-3s", "1..5s", "5s!", "é"] {
            assert!(Duration::from_text(text).is_err(), "{text:?}");
        }
        assert!(Duration::from_text("15").unwrap_err().hint.contains("15s"));
    }

    #[test]
    fn sizes() {
        for (text, bytes) in [("30MiB", 30 << 20), ("2GiB", 2 << 30), ("64 KiB", 65_536), ("1.5MB", 1_500_000), ("4096", 4096)] {
            assert_eq!(Bytes::from_text(text).unwrap(), Bytes(bytes), "{text}");
        }
        for text in ["", "MiB", "30Mb", "-1", "3 0"] {
            assert!(Bytes::from_text(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn addresses() {
        assert_eq!(SocketAddr::from_text("127.0.0.1:9090").unwrap().port(), 9090);
        assert_eq!(SocketAddr::from_text(":8080").unwrap(), "0.0.0.0:8080".parse().unwrap());
        assert_eq!(SocketAddr::from_text("[::1]:8080").unwrap().port(), 8080);
        assert_eq!(SocketAddr::from_text("0.0.0.0").unwrap_err().hint, "add a port: 0.0.0.0:8080");
        assert!(SocketAddr::from_text("8080").is_err());
    }

    #[test]
    fn urls() {
        let url = |text: &str| BackendUrl::from_text(text).unwrap().to_string();
        assert_eq!(url("http://10.0.0.1:8000"), "http://10.0.0.1:8000");
        assert_eq!(url("http://Host.example/"), "http://host.example:80");
        assert_eq!(url("http://[::1]:8000/llm/"), "http://[::1]:8000/llm");
        let hint = |text: &str| BackendUrl::from_text(text).unwrap_err().hint;
        assert_eq!(hint("10.0.0.1:8000"), "write http://10.0.0.1:8000");
        assert_eq!(hint("http://a:8000/v1"), "write http://a:8000");
        assert!(hint("https://a").contains("http://"));
        for text in ["http://", "http://a:0", "http://a:70000", "http://a b", "http://[::1", "http://a/x?y", "ftp://a", ""] {
            assert!(BackendUrl::from_text(text).is_err(), "{text:?}");
        }
        let refused = BackendUrl::from_text("http://user:s3cret@a").unwrap_err();
        assert!(!refused.to_string().contains("s3cret"));
    }

    #[test]
    fn collectors() {
        let endpoint = |text: &str| Endpoint::from_text(text).unwrap().0;
        assert_eq!(endpoint("http://localhost:4317"), "http://localhost:4317");
        assert_eq!(endpoint("http://Otel.example/"), "http://otel.example:4317");
        assert_eq!(endpoint("http://[::1]"), "http://[::1]:4317");
        let hint = |text: &str| Endpoint::from_text(text).unwrap_err().hint;
        assert_eq!(hint("localhost:4317"), "write http://localhost:4317");
        assert!(hint("https://a:4317").contains("http://"));
        for text in ["http://", "http://a:0", "http://a/v1/traces", "http://a b", "grpc://a", ""] {
            assert!(Endpoint::from_text(text).is_err(), "{text:?}");
        }
        let refused = Endpoint::from_text("http://user:s3cret@a").unwrap_err();
        assert!(!refused.to_string().contains("s3cret"));
    }

    #[test]
    fn words() {
        assert_eq!(Option::<EngineKind>::from_text("auto").unwrap(), None);
        assert_eq!(Option::<EngineKind>::from_text("llamacpp").unwrap(), Some(EngineKind::LlamaCpp));
        assert!(Option::<EngineKind>::from_text("vlm").unwrap_err().hint.starts_with("did you mean vllm?"));
        assert_eq!(Device::from_text("cuda:1").unwrap(), Device::Cuda(1));
        assert!(Device::from_text("gpu").is_err());
        assert!(Weight::from_text("0").is_err());
        assert!(Weight::from_text("NaN").is_err());
    }
}
