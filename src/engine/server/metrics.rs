//! What vLLM shows on /metrics and in its load header, under vLLM's names (`vllm/v1/metrics/loggers.py`, `vllm/entrypoints/openai/orca_metrics.py`).

use std::fmt::Write;

use super::driver::Report;
use crate::engine::{BLOCK_TOKENS, Profile};

/// Prometheus text format.
pub(super) fn text(report: &Report, profile: &Profile, model: &str) -> String {
    let labels = format!("engine=\"0\",model_name=\"{}\"", model.replace('\\', "\\\\").replace('"', "\\\""));
    let mut out = String::new();
    let mut family = |name: &str, kind: &str, help: &str, samples: &[(&str, f64)]| {
        // Writing to a String cannot fail.
        let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}");
        for (more, value) in samples {
            let _ = writeln!(out, "{name}{{{labels}{more}}} {value:?}");
        }
    };
    family("vllm:num_requests_running", "gauge", "Number of requests in model execution batches.", &[("", report.running as f64)]);
    family("vllm:num_requests_waiting", "gauge", "Number of requests waiting to be processed.", &[("", report.waiting as f64)]);
    family("vllm:kv_cache_usage_perc", "gauge", "KV-cache usage. 1 means 100 percent usage.", &[("", report.kv_usage)]);
    let counters = [
        ("vllm:prefix_cache_queries_total", "Prefix cache queries, in terms of number of queried tokens.", report.prefix_queries),
        ("vllm:prefix_cache_hits_total", "Prefix cache hits, in terms of number of cached tokens.", report.prefix_hits),
        ("vllm:num_preemptions_total", "Cumulative number of preemption from the engine.", report.preemptions),
        ("vllm:prompt_tokens_total", "Number of prefill tokens processed.", report.prompt_tokens),
        ("vllm:generation_tokens_total", "Number of generation tokens processed.", report.generation_tokens),
    ];
    for (name, help, value) in counters {
        family(name, "counter", help, &[("", value as f64)]);
    }
    family(
        "vllm:request_success_total",
        "counter",
        "Count of successfully processed requests.",
        &[(",finished_reason=\"stop\"", report.finished as f64), (",finished_reason=\"abort\"", report.aborted as f64)],
    );
    let cache = format!(
        ",block_size=\"{BLOCK_TOKENS}\",cache_dtype=\"auto\",enable_prefix_caching=\"{}\",num_gpu_blocks=\"{}\"",
        if profile.prefix_cache { "True" } else { "False" },
        profile.kv_blocks
    );
    family("vllm:cache_config_info", "gauge", "Information of the LLMEngine CacheConfig", &[(&cache, 1.0)]);
    out
}

/// The value of `endpoint-load-metrics` for a request whose `endpoint-load-metrics-format` says `format`; `None` for formats that are not known.
pub(super) fn load_header(format: &str, report: &Report) -> Option<String> {
    let (kv, waiting) = (report.kv_usage, report.waiting as f64);
    match format.to_ascii_lowercase().as_str() {
        "json" => Some(format!("JSON {{\"named_metrics\": {{\"kv_cache_usage_perc\": {kv:?}, \"num_requests_waiting\": {waiting:?}}}}}")),
        "text" => Some(format!("TEXT named_metrics.kv_cache_usage_perc={kv:?}, named_metrics.num_requests_waiting={waiting:?}")),
        _ => None,
    }
}
