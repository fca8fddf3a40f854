//! Names that look like a mistyped one.

/// The candidates that are close to `name`, the closest first, at most three.
///
/// Close is a Jaro-Winkler similarity of at least 0.8 (case ignored), which finds swapped, missing and extra letters and favours a common beginning, or a
/// name that contains the other.
pub fn near<'a>(name: &str, candidates: impl IntoIterator<Item = &'a str>) -> Vec<&'a str> {
    let wanted = name.to_lowercase();
    let mut found: Vec<(f64, &str)> = candidates
        .into_iter()
        .filter_map(|candidate| {
            let lower = candidate.to_lowercase();
            let contains = wanted.len() >= 3 && lower.len() >= 3 && (lower.contains(&wanted) || wanted.contains(&lower));
            let similarity = strsim::jaro_winkler(&wanted, &lower) + if contains { 0.2 } else { 0.0 };
            (similarity >= 0.8).then_some((similarity, candidate))
        })
        .collect();
    found.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(b.1)));
    found.truncate(3);
    found.into_iter().map(|(_, candidate)| candidate).collect()
}

#[cfg(test)]
mod tests {
    use super::near;

    #[test]
    fn finds_typos_and_not_strangers() {
        let fields = ["listen", "admin", "policy", "ranker", "pools"];
        assert_eq!(near("polcy", fields), ["policy"]);
        assert_eq!(near("Listen", fields), ["listen"]);
        assert_eq!(near("pool", fields)[0], "pools");
        assert!(near("keepalive", fields).is_empty());
    }

    #[test]
    fn finds_a_model_by_its_short_name() {
        let models = ["meta-llama/Llama-3.3-70B-Instruct", "qwen3-32b"];
        assert_eq!(near("llama-3.3-70b", models), ["meta-llama/Llama-3.3-70B-Instruct"]);
    }
}
