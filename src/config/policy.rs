//! Policies: a file, or one of those that are built in.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::error::{ConfigError, Problem};
use super::near::near;
use super::parse::parse;
use super::raw;
use super::snapshot::NamedPolicy;
use super::text::{FromText, Mistake};
use super::validate::{Checker, Place};
use crate::scheduler::{Gamma, Lead, MaxOvertake, Order, Policy, PolicyParts};

/// The files of policies/, which can be named without a path.
const BUILT_IN: [(&str, &str); 4] = [
    ("headway", include_str!("../../policies/headway.yaml")),
    ("fcfs", include_str!("../../policies/fcfs.yaml")),
    ("pars", include_str!("../../policies/pars.yaml")),
    ("uniboost", include_str!("../../policies/uniboost.yaml")),
];

/// The names of the built-in policies, the default one first.
pub fn built_in_policies() -> [&'static str; 4] {
    BUILT_IN.map(|(name, _)| name)
}

/// Where a policy comes from.
#[derive(Debug)]
pub(super) enum Source {
    BuiltIn { name: &'static str, text: &'static str },
    File(PathBuf),
}

/// `fcfs` is built in; what ends in `.yaml` or holds a slash is a file, relative to `dir`.
pub(super) fn locate(reference: &str, dir: &Path) -> Result<Source, Mistake> {
    if let Some((name, text)) = BUILT_IN.into_iter().find(|(name, _)| *name == reference) {
        return Ok(Source::BuiltIn { name, text });
    }
    let path = Path::new(reference);
    if !reference.contains('/') && !path.extension().is_some_and(|e| e == "yaml" || e == "yml") {
        let names = built_in_policies();
        let close = near(reference, names).first().map(|close| format!("did you mean {close}? ")).unwrap_or_default();
        return Err(Mistake::new(
            format!("there is no policy {reference:?}"),
            format!("{close}Built in: {}; or write the path of a policy file, for example ./my-policy.yaml", names.join(", ")),
        ));
    }
    let path = dir.join(path);
    if path.is_file() {
        return Ok(Source::File(path));
    }
    let mut there: Vec<String> = path
        .parent()
        .and_then(|parent| std::fs::read_dir(parent).ok())
        .map(|entries| entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).filter(|name| name.ends_with(".yaml")).collect())
        .unwrap_or_default();
    there.sort();
    there.truncate(12);
    let hint = if there.is_empty() {
        "no *.yaml is in that folder; paths are relative to the configuration file".into()
    } else {
        format!("in that folder: {}", there.join(", "))
    };
    Err(Mistake::new(format!("the policy file {} is not there", path.display()), hint))
}

/// A policy by its built-in name or its path (relative to the working directory), for the command line.
///
/// # Errors
/// There is no such policy, or its file is wrong.
pub fn policy(reference: &str) -> Result<NamedPolicy, ConfigError> {
    policy_beside(reference, Path::new(""))
}

/// A policy by its built-in name or its path, relative to `dir`.
///
/// # Errors
/// There is no such policy, or its file is wrong.
pub(crate) fn policy_beside(reference: &str, dir: &Path) -> Result<NamedPolicy, ConfigError> {
    let source = locate(reference, dir).map_err(|Mistake { message, hint }| ConfigError::of_file(Path::new(reference), message, hint))?;
    read(&source)
}

/// Reads a located policy.
pub(super) fn read(source: &Source) -> Result<NamedPolicy, ConfigError> {
    match source {
        Source::BuiltIn { name, text } => build(name, &Path::new("policies").join(name).with_extension("yaml"), text),
        Source::File(path) => {
            let text = std::fs::read_to_string(path)
                .map_err(|error| ConfigError::of_file(path, format!("cannot be read: {error}"), "check its permissions".into()))?;
            let name = path.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
            build(&name, path, &text)
        }
    }
}

fn build(name: &str, file: &Path, text: &str) -> Result<NamedPolicy, ConfigError> {
    let raw: raw::Policy = parse(file, text)?;
    // A policy holds no secrets and no paths, so it takes nothing from the environment and nothing is relative to it.
    let no_environment = |_: &str| None;
    let mut checker = Checker::new(file, &no_environment);
    let root = Place::root();

    let order = checker.read(&raw.order, &root.key("order"));
    let gamma = match &raw.gamma {
        None => Some(Gamma::Adaptive),
        Some(raw::TextOr::Text(text)) => checker.read_text(text, &root.key("gamma"), |text| match text {
            "adaptive" => Ok(Gamma::Adaptive),
            _ => match f64::from_text(text) {
                Ok(gamma) if gamma > 0.0 => Ok(Gamma::Fixed(gamma)),
                _ => Err(Mistake::new(
                    format!("{text:?} is not a gamma"),
                    "write adaptive, a rate in 1/s such as 0.02, { target: mean | balanced | tail } or { ttft_p99: 2s }",
                )),
            },
        }),
        Some(raw::TextOr::Long(raw::Gamma { target: Some(target), ttft_p99: None })) => {
            checker.read(target, &root.key("gamma").key("target")).map(Gamma::Target)
        }
        Some(raw::TextOr::Long(raw::Gamma { target: None, ttft_p99: Some(objective) })) => {
            checker.read(objective, &root.key("gamma").key("ttft_p99")).map(Gamma::Ttft)
        }
        Some(raw::TextOr::Long(raw::Gamma { target, .. })) => {
            let both = target.is_some();
            let at = target.as_ref().map_or(raw.order.text.referenced, |target| target.text.referenced);
            let message = if both { "target and ttft_p99 are both written" } else { "says neither target nor ttft_p99" };
            checker.problem(at, &root.key("gamma"), Mistake::new(message, "write { target: mean | balanced | tail } or { ttft_p99: 2s }"));
            None
        }
    };
    let max_overtake = match &raw.max_overtake {
        None => Some(MaxOvertake::Auto),
        Some(leaf) => checker.read_text(&leaf.text, &root.key("max_overtake"), |text| match text {
            "auto" => Ok(MaxOvertake::Auto),
            _ => Duration::from_text(text).map(MaxOvertake::Within),
        }),
    };
    let lead = match &raw.tenant_lead {
        None => Some(Lead::Auto),
        Some(leaf) => checker.read_text(&leaf.text, &root.key("tenant_lead"), |text| match text {
            "auto" => Ok(Lead::Auto),
            "unlimited" => Ok(Lead::Unlimited),
            _ => Duration::from_text(text).map(Lead::Within),
        }),
    };
    let aging = root.key("aging");
    let (threshold, share) = raw.aging.as_ref().map_or((None, None), |aging| (aging.threshold.as_ref(), aging.share.as_ref()));
    let aging_threshold = checker.duration(threshold, &aging.key("threshold"), Duration::from_secs(120));
    let aging_share = checker.optional(share, &aging.key("share"), 0.25);
    let overload = checker.optional(raw.overload.as_ref(), &root.key("overload"), true);
    checker.finish()?;

    // The checker has no problems, so all are there.
    let (Some(order), Some(gamma), Some(max_overtake), Some(lead)) = (order, gamma, max_overtake, lead) else {
        unreachable!("a value without a problem was read")
    };
    let parts = PolicyParts { order, gamma, max_overtake, aging_threshold, aging_share, lead, overload };
    let policy = Policy::new(parts).map_err(|error| Problem {
        file: file.to_owned(),
        position: Some((raw.order.text.referenced.line(), 1)),
        field: String::new(),
        message: error.to_string(),
        hint: String::new(),
    })?;
    Ok(NamedPolicy { name: name.to_owned(), policy })
}

/// Headway's own.
impl Default for NamedPolicy {
    fn default() -> Self {
        let (name, text) = BUILT_IN[0];
        // The built-in files are part of the program, and a test reads each of them.
        read(&Source::BuiltIn { name, text }).unwrap_or_else(|error| unreachable!("a built-in policy is wrong: {error}"))
    }
}

/// Whether a policy reads true lengths, which no live request has.
pub(super) fn simulation_only(policy: &Policy) -> bool {
    matches!(policy.order(), Order::OracleSjf | Order::OracleBoost)
}
